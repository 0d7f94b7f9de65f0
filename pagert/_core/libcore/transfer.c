/* SPDX-License-Identifier: Apache-2.0
 *
 * transfer: hand out what may start, and take in what has ended.
 */
#include "internal.h"

static const uint8_t source_tier[PAGERT_LINK_COUNT] = {
    [PAGERT_FILL] = PAGERT_TIER_COUNT,        [PAGERT_MOVE] = PAGERT_DEVICE,
    [PAGERT_HOST_TO_DEVICE] = PAGERT_HOST,    [PAGERT_FLASH_TO_DEVICE] = PAGERT_FLASH,
    [PAGERT_FLASH_TO_HOST] = PAGERT_FLASH,    [PAGERT_DEVICE_TO_HOST] = PAGERT_DEVICE,
    [PAGERT_DEVICE_TO_FLASH] = PAGERT_DEVICE, [PAGERT_HOST_TO_FLASH] = PAGERT_HOST,
};
static const uint8_t target_tier[PAGERT_LINK_COUNT] = {
    [PAGERT_FILL] = PAGERT_DEVICE,           [PAGERT_MOVE] = PAGERT_DEVICE,
    [PAGERT_HOST_TO_DEVICE] = PAGERT_DEVICE, [PAGERT_FLASH_TO_DEVICE] = PAGERT_DEVICE,
    [PAGERT_FLASH_TO_HOST] = PAGERT_HOST,    [PAGERT_DEVICE_TO_HOST] = PAGERT_HOST,
    [PAGERT_DEVICE_TO_FLASH] = PAGERT_FLASH, [PAGERT_HOST_TO_FLASH] = PAGERT_FLASH,
};
/* What compute waits for comes first: bytes that are nearly there, then the long way up, then room. */
static const uint8_t order[PAGERT_LINK_COUNT] = {
    PAGERT_FILL, PAGERT_MOVE, PAGERT_HOST_TO_DEVICE, PAGERT_DEVICE_TO_HOST,
    PAGERT_FLASH_TO_DEVICE, PAGERT_FLASH_TO_HOST, PAGERT_DEVICE_TO_FLASH, PAGERT_HOST_TO_FLASH,
};

static uint32_t source_frame(const page *p, uint32_t link)
{
    return link == PAGERT_FILL ? NONE : p->frame[source_tier[link]];
}

static uint32_t target_frame(const page *p, uint32_t link)
{
    return link == PAGERT_MOVE ? p->move_frame : p->frame[target_tier[link]];
}

int pagert_next_transfer(pagert_core *core, uint32_t link_mask, pagert_transfer *transfer)
{
    for (uint32_t k = 0; k < PAGERT_LINK_COUNT; k++) {
        uint32_t link = order[k];
        if (!(link_mask >> link & 1) || core->queues[link].count == 0)
            continue;
        uint32_t first = core->queues[link].oldest;
        const page *head = &core->pages[first];
        *transfer = (pagert_transfer){.link = link,
                                      .first_page = first,
                                      .source_frame = source_frame(head, link),
                                      .target_frame = target_frame(head, link)};
        uint32_t count = 0;
        do { /* join the neighbours that take the same way */
            page_take_off(core, first + count);
            count++;
            const page *next = &core->pages[first + count];
            if (first + count == core->config.page_count || !has(next, PAGE_LIVE) ||
                next->region != head->region || next->queue != link || has(next, PAGE_IN_FLIGHT) ||
                target_frame(next, link) != transfer->target_frame + count ||
                (link != PAGERT_FILL && source_frame(next, link) != transfer->source_frame + count))
                break;
        } while (count < core->config.transfer_pages_max);
        transfer->page_count = count;
        core->in_flight++;
        return 1;
    }
    return 0;
}

static void succeed(pagert_core *core, uint32_t index, uint32_t link)
{
    page *p = &core->pages[index];
    if (link == PAGERT_MOVE) {
        device_finish_move(core, index);
        return;
    }
    p->copy[target_tier[link]] = COPY_VALID;
    if (link == PAGERT_DEVICE_TO_HOST || link == PAGERT_DEVICE_TO_FLASH)
        core->write_ahead_failed = false;
    if (link == PAGERT_HOST_TO_FLASH) {
        lower_end_leaving_host(core, index);
        page_drop_lower(core, index, PAGERT_HOST);
    }
    page_advance(core, index);
}

static void fail(pagert_core *core, uint32_t index, const pagert_failure *failure)
{
    switch (failure->link) {
    case PAGERT_MOVE:
        fail_move(core, index, failure);
        break;
    case PAGERT_FILL:
    case PAGERT_HOST_TO_DEVICE:
    case PAGERT_FLASH_TO_DEVICE:
        fail_page(core, index, failure, false);
        break;
    case PAGERT_FLASH_TO_HOST:
        page_drop_lower(core, index, PAGERT_HOST);
        fail_page(core, index, failure, false);
        break;
    case PAGERT_DEVICE_TO_HOST:
    case PAGERT_DEVICE_TO_FLASH:
        fail_writeback(core, index, failure, false);
        break;
    default:
        PAGERT_ASSERT(failure->link == PAGERT_HOST_TO_FLASH);
        lower_end_leaving_host(core, index);
        page_drop_lower(core, index, PAGERT_FLASH);
        page_advance(core, index);
        lower_fail_waiter(core, failure); /* who waited for this frame learns why */
        break;
    }
}

int pagert_complete(pagert_core *core, const pagert_transfer *transfer, int32_t result)
{
    uint32_t link = transfer->link;
    if (link >= PAGERT_LINK_COUNT || transfer->page_count == 0 ||
        transfer->first_page >= core->config.page_count ||
        transfer->page_count > core->config.page_count - transfer->first_page)
        return PAGERT_E_ARGUMENT;
    for (uint32_t i = 0; i < transfer->page_count; i++) {
        const page *p = &core->pages[transfer->first_page + i];
        if (!has(p, PAGE_IN_FLIGHT) || p->queue != link ||
            target_frame(p, link) != transfer->target_frame + i ||
            (link != PAGERT_FILL && source_frame(p, link) != transfer->source_frame + i))
            return PAGERT_E_STATE;
    }
    PAGERT_ASSERT(core->in_flight > 0);
    core->in_flight--;
    if (result < 0) {
        core->counters.failed_transfers++;
    } else {
        core->counters.transfers[link]++;
        core->counters.transferred[link] += transfer->page_count;
        TELL(core, transferred, core, link, transfer->page_count);
    }
    for (uint32_t i = 0; i < transfer->page_count; i++) {
        uint32_t index = transfer->first_page + i;
        pagert_failure failure = {index, link, result};
        page_leave_queue(core, index);
        if (has(&core->pages[index], PAGE_DYING)) {
            page_purge(core, index);
            region_page_gone(core, index);
        } else if (result < 0) {
            fail(core, index, &failure);
        } else {
            succeed(core, index, link);
        }
    }
    lower_grant_host(core);
    PAGERT_ASSERT_SLOW(core);
    return 0;
}

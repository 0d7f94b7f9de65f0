/* SPDX-License-Identifier: Apache-2.0
 *
 * check: verify every invariant of the whole state, from the page table up. O(pages); for tests.
 */
#include "list.h"

#define CHECK(condition)     \
    do {                     \
        if (!(condition))    \
            return __LINE__; \
    } while (0)

typedef struct totals {
    uint64_t used[PAGERT_TIER_COUNT], reserved, in_queue[QUEUE_COUNT], in_host_list[HOST_LISTS];
    uint64_t host_leaving, host_in_transfer, move_in_transfer, evictable, vacating, moving, held;
    uint64_t pages_in_flight;
} totals;

static int check_copies(const pagert_core *core, const page *p)
{
    bool valid = has(p, PAGE_ZERO);
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++) {
        CHECK(p->copy[tier] <= COPY_VALID);
        valid |= p->copy[tier] == COPY_VALID;
        if (p->copy[tier] == COPY_NONE)
            continue;
        CHECK(configured(core, tier));
        CHECK(p->frame[tier] < core->config.frame_count[tier]);
        CHECK(frame_set_contains(&core->sets[tier], p->frame[tier]));
    }
    CHECK(valid); /* the last copy is never dropped */
    return 0;
}

static int check_device(const pagert_core *core, uint32_t index, totals *sum)
{
    const page *p = &core->pages[index];
    if (has(p, PAGE_MOVING)) {
        CHECK(p->copy[PAGERT_DEVICE] == COPY_VALID && !has(p, PAGE_LEAVING));
        CHECK(p->move_frame < core->config.frame_count[PAGERT_DEVICE]);
        CHECK(core->frames[p->move_frame].heir == index);
        sum->moving++;
    }
    CHECK(!has(p, PAGE_OVERWRITE) || p->copy[PAGERT_DEVICE] == COPY_INCOMING);
    CHECK(!has(p, PAGE_FAILED) || p->holds > 0);
    CHECK(!has(p, PAGE_WANTED));
    CHECK(!has(p, PAGE_LEAVING) || (p->copy[PAGERT_DEVICE] == COPY_VALID && p->holds == 0));
    if (p->copy[PAGERT_DEVICE] == COPY_NONE)
        return 0;
    const device_frame *f = &core->frames[p->frame[PAGERT_DEVICE]];
    if (p->copy[PAGERT_DEVICE] == COPY_VALID) {
        CHECK(f->page == index);
        sum->vacating += has(p, PAGE_LEAVING) && f->heir == NONE;
    } else {
        CHECK(f->page == index || f->heir == index);
    }
    sum->held += p->holds > 0;
    return 0;
}

static int check_queue(const pagert_core *core, uint32_t index, totals *sum)
{
    const page *p = &core->pages[index];
    CHECK(!has(p, PAGE_IN_FLIGHT) || p->queue < PAGERT_LINK_COUNT);
    if (p->queue == QUEUE_NONE)
        return 0;
    CHECK(p->queue < QUEUE_COUNT);
    if (has(p, PAGE_IN_FLIGHT))
        sum->pages_in_flight++;
    else
        sum->in_queue[p->queue]++;
    bool host = false;
    switch (p->queue) {
    case PAGERT_FILL:
        CHECK(p->copy[PAGERT_DEVICE] == COPY_INCOMING && device_owns(core, index) && has(p, PAGE_ZERO));
        break;
    case PAGERT_MOVE:
        CHECK(has(p, PAGE_MOVING) && core->frames[p->move_frame].page == NONE);
        sum->move_in_transfer++;
        break;
    case PAGERT_HOST_TO_DEVICE:
        CHECK(p->copy[PAGERT_DEVICE] == COPY_INCOMING && device_owns(core, index));
        CHECK(p->copy[PAGERT_HOST] == COPY_VALID);
        host = true;
        break;
    case PAGERT_FLASH_TO_DEVICE:
        CHECK(p->copy[PAGERT_DEVICE] == COPY_INCOMING && device_owns(core, index));
        CHECK(p->copy[PAGERT_FLASH] == COPY_VALID && !configured(core, PAGERT_HOST));
        break;
    case PAGERT_FLASH_TO_HOST:
        CHECK(p->copy[PAGERT_HOST] == COPY_INCOMING && p->copy[PAGERT_FLASH] == COPY_VALID);
        host = true;
        break;
    case PAGERT_DEVICE_TO_HOST:
        CHECK(p->copy[PAGERT_DEVICE] == COPY_VALID && p->copy[PAGERT_HOST] == COPY_INCOMING);
        host = true;
        break;
    case PAGERT_DEVICE_TO_FLASH:
        CHECK(p->copy[PAGERT_DEVICE] == COPY_VALID && p->copy[PAGERT_FLASH] == COPY_INCOMING);
        CHECK(!configured(core, PAGERT_HOST));
        break;
    case PAGERT_HOST_TO_FLASH:
        CHECK(p->copy[PAGERT_HOST] == COPY_VALID && p->copy[PAGERT_FLASH] == COPY_INCOMING);
        CHECK(has(p, PAGE_LEAVING_HOST));
        host = true;
        break;
    default:
        CHECK(p->copy[PAGERT_HOST] == COPY_NONE);
        break;
    }
    sum->host_in_transfer += host;
    return 0;
}

static int check_page(const pagert_core *core, uint32_t index, totals *sum)
{
    const page *p = &core->pages[index];
    int line;
    if ((line = check_copies(core, p)) || (line = check_device(core, index, sum)) ||
        (line = check_queue(core, index, sum)))
        return line;
    for (uint32_t tier = 1; tier < PAGERT_TIER_COUNT; tier++)
        sum->used[tier] += p->copy[tier] != COPY_NONE;
    bool evictable = p->copy[PAGERT_DEVICE] == COPY_VALID && p->holds == 0 &&
                     !has(p, PAGE_LEAVING | PAGE_MOVING | PAGE_DYING);
    CHECK(evictable == has(p, PAGE_EVICTABLE));
    sum->evictable += evictable;
    sum->host_leaving += has(p, PAGE_LEAVING_HOST);
    uint32_t list = (p->flags & PAGE_HOST_LIST) >> PAGE_HOST_LIST_SHIFT;
    bool listed = p->copy[PAGERT_HOST] == COPY_VALID && !has(p, PAGE_DYING) &&
                  (p->queue == QUEUE_NONE || p->queue == PAGERT_MOVE);
    CHECK(listed == (list != 0));
    if (listed)
        sum->in_host_list[list - 1]++;
    return 0;
}

static int check_frames(const pagert_core *core, totals *sum)
{
    for (uint32_t frame = 0; frame < core->config.frame_count[PAGERT_DEVICE]; frame++) {
        const device_frame *f = &core->frames[frame];
        bool used = f->page != NONE || f->heir != NONE;
        CHECK(used == frame_set_contains(&core->sets[PAGERT_DEVICE], frame));
        bool vacating = f->page != NONE && f->heir == NONE && has(&core->pages[f->page], PAGE_LEAVING);
        CHECK((!used || vacating) == frame_runs_contains(&core->runs, frame));
        sum->used[PAGERT_DEVICE] += used;
        if (f->page != NONE) {
            const page *p = &core->pages[f->page];
            CHECK(has(p, PAGE_LIVE) && p->copy[PAGERT_DEVICE] != COPY_NONE);
            CHECK(p->frame[PAGERT_DEVICE] == frame);
        }
        if (f->heir != NONE) {
            const page *heir = &core->pages[f->heir];
            CHECK(has(heir, PAGE_LIVE) && f->heir != f->page);
            CHECK(has(heir, PAGE_MOVING)
                      ? heir->move_frame == frame
                      : heir->copy[PAGERT_DEVICE] == COPY_INCOMING && heir->frame[PAGERT_DEVICE] == frame);
            CHECK(has(heir, PAGE_MOVING) || f->page != NONE);
            if (f->page != NONE) /* a promise is kept: whoever is there is on the way out */
                CHECK(has(&core->pages[f->page], PAGE_LEAVING | PAGE_MOVING));
        }
    }
    return 0;
}

/* Walk the address space: live regions and free runs, nothing between. */
static int check_regions(const pagert_core *core, totals *sum)
{
    bool free_before = false;
    for (uint32_t first = 0; first < core->config.page_count;) {
        const page *head = &core->pages[first];
        CHECK(head->page_count > 0 && head->page_count <= core->config.page_count - first);
        if (!has(head, PAGE_LIVE) && has(head, PAGE_EXTENT_FIRST)) {
            const page *last = &core->pages[first + head->page_count - 1];
            CHECK(!free_before); /* neighbours are joined */
            CHECK(!has(last, PAGE_LIVE) && has(last, PAGE_EXTENT_LAST) && last->region == first);
            free_before = true;
            first += head->page_count;
            continue;
        }
        free_before = false;
        bool dying = false;
        uint32_t gone = 0;
        for (uint32_t i = 0; i < head->page_count; i++) {
            const page *p = &core->pages[first + i];
            CHECK(p->region == first);
            if (!has(p, PAGE_LIVE)) { /* forgotten already, while a neighbour's transfer is in flight */
                gone++;
                continue;
            }
            dying |= has(p, PAGE_DYING);
            CHECK(!has(p, PAGE_DYING) || has(p, PAGE_IN_FLIGHT));
            int line = check_page(core, first + i, sum);
            if (line != 0)
                return line;
        }
        CHECK(dying ? head->tail_bytes == head->page_count - gone : gone == 0);
        if (!dying) {
            CHECK(has(head, PAGE_HEAD));
            sum->reserved += head->page_count;
        }
        first += head->page_count;
    }
    return 0;
}

static int check_list(const pagert_core *core, const page_list *list, uint32_t kind)
{
    uint32_t count = 0, previous = NONE;
    for (uint32_t index = list->oldest; index != NONE; index = core->pages[index].links[kind].younger) {
        CHECK(core->pages[index].links[kind].older == previous);
        CHECK(++count <= list->count);
        previous = index;
    }
    CHECK(count == list->count && list->youngest == previous);
    return 0;
}

int pagert_check(const pagert_core *core)
{
    totals sum = {0};
    int line;
    if ((line = check_frames(core, &sum)) || (line = check_regions(core, &sum)))
        return line;
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++) {
        CHECK(sum.used[tier] == core->sets[tier].used_count);
        CHECK(core->sets[tier].used_count <= core->sets[tier].frame_count);
        CHECK(core->sets[tier].used_count <= core->sets[tier].peak_count);
    }
    for (uint32_t queue = 0; queue < QUEUE_COUNT; queue++) {
        CHECK(sum.in_queue[queue] == core->queues[queue].count);
        if ((line = check_list(core, &core->queues[queue], LIST_QUEUE)))
            return line;
    }
    for (uint32_t list = 0; list < HOST_LISTS; list++) {
        CHECK(sum.in_host_list[list] == core->host_lists[list].count);
        if ((line = check_list(core, &core->host_lists[list], LIST_HOST)))
            return line;
    }
    CHECK(sum.evictable == core->policy->evictable_count(core));
    CHECK(sum.vacating == core->vacating);
    CHECK(sum.moving == core->moving);
    CHECK(sum.held == core->held_frames);
    CHECK(sum.host_leaving == core->host_leaving);
    CHECK(sum.host_in_transfer == core->host_in_transfer);
    CHECK(sum.move_in_transfer == core->move_in_transfer);
    CHECK(sum.reserved == core->reserved_pages);
    CHECK(sum.pages_in_flight >= core->in_flight);
    return core->policy->check != NULL ? core->policy->check(core) : 0;
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * core: the memory it lives in, its regions, and what can be asked of it.
 */
#include "list.h"

#define ALIGNMENT 64

static uint64_t align_up(uint64_t bytes) { return (bytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1); }

typedef struct layout {
    uint64_t pages, frames, words[PAGERT_TIER_COUNT], runs, policy, total;
} layout;

static layout lay_out(const pagert_config *config)
{
    layout at = {0};
    uint64_t end = align_up(sizeof(pagert_core));
    at.pages = end;
    end += sizeof(page) * (uint64_t)config->page_count;
    at.frames = end;
    end = align_up(end + sizeof(device_frame) * (uint64_t)config->frame_count[PAGERT_DEVICE]);
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++) {
        at.words[tier] = end;
        end = align_up(end + sizeof(uint64_t) * frame_set_words(config->frame_count[tier]));
    }
    at.runs = end;
    end = align_up(end + frame_runs_bytes(config->frame_count[PAGERT_DEVICE]));
    at.policy = end;
    at.total = align_up(end + config->policy->state_bytes(config));
    return at;
}

static bool is_valid(const pagert_config *config)
{
    uint64_t bytes = config->page_bytes;
    return bytes >= 4096 && (bytes & (bytes - 1)) == 0 && bytes <= UINT32_MAX &&
           config->page_count > 0 && config->page_count < NONE && config->transfer_pages_max > 0 &&
           config->policy != NULL && config->frame_count[PAGERT_DEVICE] > 0 &&
           config->frame_count[PAGERT_DEVICE] < NONE && config->frame_count[PAGERT_HOST] < NONE &&
           config->frame_count[PAGERT_FLASH] < NONE &&
           (config->frame_count[PAGERT_HOST] > 0 || config->frame_count[PAGERT_FLASH] > 0);
}

uint64_t pagert_memory_bytes(const pagert_config *config)
{
    return is_valid(config) ? lay_out(config).total : 0;
}

int pagert_init(const pagert_config *config, void *memory, uint64_t memory_bytes, pagert_core **core_out)
{
    if (!is_valid(config) || memory == NULL || (uintptr_t)memory % ALIGNMENT != 0)
        return PAGERT_E_ARGUMENT;
    layout at = lay_out(config);
    if (memory_bytes < at.total)
        return PAGERT_E_ARGUMENT;
    unsigned char *base = memory;
    pagert_core *core = memory;
    core->config = *config;
    core->page_shift = (uint32_t)__builtin_ctzll(config->page_bytes);
    core->lower_tier = configured(core, PAGERT_HOST) ? PAGERT_HOST : PAGERT_FLASH;
    core->pages = (page *)(void *)(base + at.pages);
    core->frames = (device_frame *)(void *)(base + at.frames);
    for (uint32_t frame = 0; frame < config->frame_count[PAGERT_DEVICE]; frame++)
        core->frames[frame] = (device_frame){NONE, NONE};
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++)
        frame_set_init(&core->sets[tier], config->frame_count[tier],
                       (uint64_t *)(void *)(base + at.words[tier]));
    frame_runs_init(&core->runs, config->frame_count[PAGERT_DEVICE], base + at.runs);
    for (uint32_t queue = 0; queue < QUEUE_COUNT; queue++)
        list_init(&core->queues[queue]);
    for (uint32_t list = 0; list < HOST_LISTS; list++)
        list_init(&core->host_lists[list]);
    core->flush_failed.page = NONE;
    core->policy = config->policy;
    core->policy_state = base + at.policy;
    core->policy->init(core);
    extents_init(core);
    *core_out = core;
    return 0;
}

int pagert_reserve(pagert_core *core, uint64_t size_bytes, pagert_region *region)
{
    if (size_bytes == 0)
        return PAGERT_E_ARGUMENT;
    uint64_t count = ((size_bytes - 1) >> core->page_shift) + 1;
    if (count > core->config.page_count)
        return PAGERT_E_PAGES;
    uint32_t first = extents_take(core, (uint32_t)count);
    if (first == NONE)
        return PAGERT_E_PAGES;
    for (uint32_t i = 0; i < count; i++) {
        page *p = &core->pages[first + i];
        uint32_t generation = p->generation;
        *p = (page){.region = first, .queue = QUEUE_NONE, .generation = generation};
        p->flags = PAGE_LIVE | PAGE_ZERO;
    }
    page *head = &core->pages[first];
    set_flag(head, PAGE_HEAD);
    head->generation++;
    head->page_count = (uint32_t)count;
    head->tail_bytes = (uint32_t)(size_bytes - ((count - 1) << core->page_shift));
    core->reserved_pages += count;
    TELL(core, reserved, core, first, (uint32_t)count);
    *region = (pagert_region){first, head->generation};
    return 0;
}

/* A page of a released region is forgotten; with the last one its address space is free again. */
void region_page_gone(pagert_core *core, uint32_t index)
{
    uint32_t first = core->pages[index].region;
    page *head = &core->pages[first];
    PAGERT_ASSERT(head->tail_bytes > 0);
    if (--head->tail_bytes == 0)
        extents_give(core, first, head->page_count);
}

int pagert_release(pagert_core *core, pagert_region region)
{
    uint32_t first, one;
    int code = region_pages(core, region, 0, 1, &first, &one);
    if (code < 0)
        return code;
    page *head = &core->pages[first];
    uint32_t count = head->page_count;
    for (uint32_t i = 0; i < count; i++)
        if (core->pages[first + i].holds > 0)
            return PAGERT_E_STATE;
    for (const pagert_pin *pin = core->unready; pin != NULL; pin = pin->next)
        for (uint32_t k = 0; k < pin->access_count; k++)
            if (pin->accesses[k].region.first_page == first)
                return PAGERT_E_STATE;
    core->reserved_pages -= count;
    TELL(core, released, core, first);
    head->tail_bytes = count; /* from here on: pages that are not forgotten yet */
    for (uint32_t i = 0; i < count; i++)
        page_purge(core, first + i);
    for (uint32_t i = 0; i < count; i++)
        if (!has(&core->pages[first + i], PAGE_DYING))
            region_page_gone(core, first + i);
    lower_grant_host(core);
    PAGERT_ASSERT_SLOW(core);
    return 0;
}

/* A writeback that flush or evict asked for has failed, of one of these pages: say so once. */
static int take_failure(pagert_core *core, uint32_t first, uint32_t count, pagert_failure *failure)
{
    failed_writeback *failed = &core->flush_failed;
    if (failed->page == NONE || failed->page - first >= count)
        return 0;
    failed->page = NONE;
    if (failure != NULL)
        *failure = failed->failure;
    return failed->full ? PAGERT_E_FULL : PAGERT_E_TRANSFER;
}

int64_t pagert_evict(pagert_core *core, pagert_region region, uint64_t offset_bytes,
                     uint64_t size_bytes, pagert_failure *failure)
{
    uint32_t first, count;
    int code = region_pages(core, region, offset_bytes, size_bytes, &first, &count);
    if (code < 0)
        return code;
    code = take_failure(core, first, count, failure);
    if (code < 0)
        return code;
    for (uint32_t i = 0; i < count; i++)
        if (core->pages[first + i].holds > 0)
            return PAGERT_E_STATE;
    int64_t remaining = 0;
    for (uint32_t i = 0; i < count; i++) {
        page *p = &core->pages[first + i];
        if (p->copy[PAGERT_DEVICE] != COPY_INCOMING && !has(p, PAGE_MOVING))
            TELL(core, sent_away, core, first + i);
        if (p->copy[PAGERT_DEVICE] == COPY_VALID && !has(p, PAGE_LEAVING | PAGE_MOVING)) {
            if (!is_clean(p))
                set_flag(p, PAGE_CLEANING); /* so that a failure is reported */
            page_start_leaving(core, first + i);
        }
    }
    lower_grant_host(core);
    code = take_failure(core, first, count, failure);
    if (code < 0)
        return code;
    for (uint32_t i = 0; i < count; i++)
        remaining += core->pages[first + i].copy[PAGERT_DEVICE] != COPY_NONE;
    PAGERT_ASSERT_SLOW(core);
    return remaining;
}

int64_t pagert_flush(pagert_core *core, pagert_failure *failure)
{
    int code = take_failure(core, 0, core->config.page_count, failure);
    int64_t remaining = 0;
    core->flushing = code == 0;
    if (code == 0)
        TELL(core, flushed, core);
    for (uint32_t frame = 0; frame < core->config.frame_count[PAGERT_DEVICE] && code == 0; frame++) {
        uint32_t index = core->frames[frame].page;
        if (index == NONE)
            continue;
        page *p = &core->pages[index];
        if (p->copy[PAGERT_DEVICE] != COPY_VALID || is_clean(p) || p->holds > 0 || has(p, PAGE_DYING))
            continue;
        if (!has(p, PAGE_LEAVING | PAGE_CLEANING | PAGE_MOVING)) {
            set_flag(p, PAGE_CLEANING);
            page_advance(core, index);
            code = take_failure(core, 0, core->config.page_count, failure);
        }
        remaining++;
    }
    lower_grant_host(core);
    if (code == 0)
        code = take_failure(core, 0, core->config.page_count, failure);
    if (code < 0 || remaining == 0)
        core->flushing = false;
    PAGERT_ASSERT_SLOW(core);
    return code < 0 ? code : remaining;
}

int pagert_locate(pagert_core *core, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                  pagert_residency *residency)
{
    uint32_t first, count;
    int code = region_pages(core, region, offset_bytes, size_bytes, &first, &count);
    if (code < 0)
        return code;
    pagert_residency found = {0};
    for (uint32_t i = 0; i < count; i++) {
        const page *p = &core->pages[first + i];
        uint32_t tier = PAGERT_DEVICE;
        while (tier < PAGERT_TIER_COUNT && p->copy[tier] != COPY_VALID)
            tier++;
        if (tier < PAGERT_TIER_COUNT)
            found.pages[tier]++;
        else
            found.zero++;
    }
    *residency = found;
    return 0;
}

void pagert_get_counters(const pagert_core *core, pagert_counters *counters)
{
    *counters = core->counters;
}

void pagert_get_usage(const pagert_core *core, uint32_t tier, pagert_usage *usage)
{
    PAGERT_ASSERT(tier < PAGERT_TIER_COUNT);
    const frame_set *set = &core->sets[tier];
    *usage = (pagert_usage){set->frame_count, set->used_count, set->peak_count};
}

uint32_t pagert_held_frames(const pagert_core *core) { return core->held_frames; }
uint64_t pagert_reserved_pages(const pagert_core *core) { return core->reserved_pages; }
uint32_t pagert_in_flight(const pagert_core *core) { return core->in_flight; }
int pagert_is_idle(const pagert_core *core) { return is_quiet(core); }

void pagert_reset_counters(pagert_core *core)
{
    core->counters = (pagert_counters){0};
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++)
        core->sets[tier].peak_count = core->sets[tier].used_count;
}

static uint32_t state_of(const page *p)
{
    if (!has(p, PAGE_LIVE) || has(p, PAGE_DYING))
        return PAGERT_PAGE_FREE;
    if (p->copy[PAGERT_DEVICE] == COPY_INCOMING)
        return PAGERT_PAGE_FETCHING;
    if (p->copy[PAGERT_DEVICE] == COPY_VALID) {
        bool writing = p->queue == PAGERT_DEVICE_TO_HOST || p->queue == PAGERT_DEVICE_TO_FLASH;
        return writing || has(p, PAGE_LEAVING | PAGE_CLEANING) ? PAGERT_PAGE_WRITING_BACK
                                                               : PAGERT_PAGE_RESIDENT;
    }
    return has(p, PAGE_ZERO) ? PAGERT_PAGE_ZERO : PAGERT_PAGE_ABSENT;
}

int pagert_page(const pagert_core *core, uint32_t index, pagert_page_info *info)
{
    if (index >= core->config.page_count)
        return PAGERT_E_ARGUMENT;
    const page *p = &core->pages[index];
    pagert_page_info found = {.state = state_of(p), .holds = p->holds};
    for (uint32_t tier = 0; tier < PAGERT_TIER_COUNT; tier++)
        found.frame[tier] = has(p, PAGE_LIVE) && p->copy[tier] == COPY_VALID ? p->frame[tier] : NONE;
    found.dirty = p->copy[PAGERT_DEVICE] == COPY_VALID && !is_clean(p);
    *info = found;
    return 0;
}

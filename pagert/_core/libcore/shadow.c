/* SPDX-License-Identifier: Apache-2.0
 *
 * shadow: see shadow.h. Owns the memory it is given; a step is O(1) for each page that it concerns.
 */
#include "shadow.h"

enum {
    KEPT = 1 << 0,      /* LRU has the page */
    DIRTY = 1 << 1,     /* and it is dirty there */
    UNPAID = 1 << 2,    /* and was not fetched: a pin that holds it is going to overwrite it */
    SPARE = 1 << 3,     /* on the list of spares */
    DUE_SHIFT = 4,      /* from here on: what is due for the page, 0 to 2 */
};

enum { LIMIT_PERCENT = 110 };

uint64_t shadow_bytes(const pagert_config *config)
{
    return (uint64_t)config->page_count * (sizeof(page_link) + sizeof(uint8_t));
}

/* The memory is zeroed: no page is in a list, and no link of such a page is read. */
void shadow_init(pagert_core *core, unsigned char *memory)
{
    shadow *state = core->policy_state;
    *state = (shadow){.links = (page_link *)(void *)memory,
                      .flags = memory + (uint64_t)core->config.page_count * sizeof(page_link),
                      .kept = {NONE, NONE, 0},
                      .spares = {NONE, NONE, 0}};
}

static shadow *shadow_of(const pagert_core *core) { return core->policy_state; }

static void append(shadow *s, page_list *list, uint32_t index)
{
    s->links[index] = (page_link){.older = list->youngest, .younger = NONE};
    *(list->youngest == NONE ? &list->oldest : &s->links[list->youngest].younger) = index;
    list->youngest = index;
    list->count++;
}

static void take_out(shadow *s, page_list *list, uint32_t index)
{
    page_link link = s->links[index];
    *(link.older == NONE ? &list->oldest : &s->links[link.older].younger) = link.younger;
    *(link.younger == NONE ? &list->youngest : &s->links[link.younger].older) = link.older;
    list->count--;
}

static void make_youngest(shadow *s, uint32_t index)
{
    if (s->kept.youngest == index)
        return;
    take_out(s, &s->kept, index);
    append(s, &s->kept, index);
}

static bool crosses_border(uint32_t link)
{
    return link == PAGERT_HOST_TO_DEVICE || link == PAGERT_FLASH_TO_DEVICE ||
           link == PAGERT_DEVICE_TO_HOST || link == PAGERT_DEVICE_TO_FLASH;
}

/* What may yet be moved for the page beyond what LRU moves for it: see shadow.h. */
static uint32_t due_for(const page *p, uint32_t flags)
{
    if (has(p, PAGE_DYING))
        return has(p, PAGE_IN_FLIGHT) && crosses_border(p->queue);
    bool fetched_by_lru = (flags & (KEPT | UNPAID)) == KEPT && !has(p, PAGE_ZERO);
    if (p->copy[PAGERT_DEVICE] == COPY_NONE)
        return fetched_by_lru;
    if (p->copy[PAGERT_DEVICE] == COPY_INCOMING)
        return has(p, PAGE_OVERWRITE) ? fetched_by_lru : !has(p, PAGE_ZERO);
    uint32_t due = has(p, PAGE_LEAVING) && fetched_by_lru;
    if (!is_clean(p))
        due += has(p, PAGE_LEAVING | PAGE_CLEANING) || crosses_border(p->queue) || !(flags & DIRTY);
    return due;
}

/* Bring the page's share of `due`, and whether it is a spare, up to date. */
void shadow_changed(pagert_core *core, uint32_t index)
{
    shadow *s = shadow_of(core);
    const page *p = &core->pages[index];
    uint32_t flags = s->flags[index];
    if (has(p, PAGE_DYING) && (flags & KEPT)) {
        take_out(s, &s->kept, index);
        s->unpaid -= (flags & UNPAID) != 0;
        flags &= ~(uint32_t)(KEPT | DIRTY | UNPAID);
    }
    bool spare = has(p, PAGE_EVICTABLE) && !(flags & KEPT);
    if (spare != ((flags & SPARE) != 0)) {
        if (spare)
            append(s, &s->spares, index);
        else
            take_out(s, &s->spares, index);
        flags ^= SPARE;
    }
    uint32_t due = due_for(p, flags);
    s->due = s->due - (flags >> DUE_SHIFT) + due;
    s->flags[index] = (uint8_t)((flags & ((1u << DUE_SHIFT) - 1)) | due << DUE_SHIFT);
}

static void pay(pagert_core *core)
{
    shadow_of(core)->lru_moved++;
    core->counters.lru_moved++;
}

/* LRU gives the page up, without a writeback. */
static void forget(pagert_core *core, uint32_t index)
{
    shadow *s = shadow_of(core);
    take_out(s, &s->kept, index);
    s->unpaid -= (s->flags[index] & UNPAID) != 0;
    s->flags[index] &= (uint8_t)~(KEPT | DIRTY | UNPAID);
    shadow_changed(core, index);
}

static void evict(pagert_core *core, uint32_t index)
{
    if (shadow_of(core)->flags[index] & DIRTY)
        pay(core);
    forget(core, index);
}

/* LRU evicts its oldest pages until `coming` more fit. Held ones, which are few, go to the other end. */
static void fit(pagert_core *core, uint32_t coming)
{
    shadow *s = shadow_of(core);
    uint64_t frame_count = core->config.frame_count[PAGERT_DEVICE];
    for (uint32_t tries = s->kept.count; tries > 0; tries--) {
        if (s->kept.count + (uint64_t)coming <= frame_count)
            break;
        const page *p = &core->pages[s->kept.oldest];
        if (p->holds > 0 && !has(p, PAGE_FAILED))
            make_youngest(s, s->kept.oldest);
        else
            evict(core, s->kept.oldest);
    }
    if (s->kept.oldest != NONE) { /* the next to go, most likely: by then it is in the processor's cache */
        __builtin_prefetch(&core->pages[s->kept.oldest]);
        __builtin_prefetch(&s->links[s->kept.oldest]);
        __builtin_prefetch(&s->flags[s->kept.oldest]);
    }
}

void shadow_expect(pagert_core *core, const pagert_pin *pin)
{
    const shadow *s = shadow_of(core);
    for (uint32_t k = 0; k < pin->access_count; k++) {
        __builtin_prefetch(&s->links[pin->accesses[k].first_page]);
        __builtin_prefetch(&s->flags[pin->accesses[k].first_page]);
    }
}

void shadow_making_room(pagert_core *core, const pagert_pin *pin)
{
    const shadow *s = shadow_of(core);
    if (pin->needed_at != 0) /* nobody asked for it: LRU does not */
        return;
    uint32_t coming = 0;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->span_count; i++)
            coming += !(s->flags[a->span_first + i] & KEPT);
    }
    fit(core, coming);
}

/* LRU does not have the page yet: it comes, with a fetch unless there is nothing to fetch. */
static void bring(pagert_core *core, uint32_t index, bool overwrite)
{
    shadow *s = shadow_of(core);
    PAGERT_ASSERT(!(s->flags[index] & SPARE)); /* it is held */
    append(s, &s->kept, index);
    s->flags[index] |= KEPT;
    if (overwrite) {
        s->flags[index] |= UNPAID;
        s->unpaid++;
    } else if (!has(&core->pages[index], PAGE_ZERO)) {
        pay(core);
    }
    shadow_changed(core, index);
}

void shadow_placed(pagert_core *core, pagert_pin *pin)
{
    shadow *s = shadow_of(core);
    if (pin->needed_at != 0)
        return;
    pin->use = ++s->uses;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->page_count; i++) {
            uint32_t index = a->first_page + i;
            if (s->flags[index] & KEPT)
                make_youngest(s, index);
            else
                bring(core, index, pin_overwrites(core, pin, index));
        }
    }
    fit(core, 0);
}

/* It was not placed, but the fetch of some pages has begun, and goes on. */
void shadow_begun(pagert_core *core, const pagert_pin *pin)
{
    const shadow *s = shadow_of(core);
    if (pin->needed_at != 0)
        return;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->page_count; i++) {
            const page *p = &core->pages[a->first_page + i];
            if (p->copy[PAGERT_DEVICE] == COPY_INCOMING && !has(p, PAGE_OVERWRITE) &&
                !(s->flags[a->first_page + i] & KEPT))
                bring(core, a->first_page + i, false);
        }
    }
    fit(core, 0);
}

/* The use ends, which makes a difference if there were others since it began. What was to be overwritten and
 * was not, is not there. */
void shadow_let_go(pagert_core *core, const pagert_pin *pin)
{
    shadow *s = shadow_of(core);
    if (pin->needed_at != 0 || (pin->use == s->uses && s->unpaid == 0))
        return;
    if (pin->use != s->uses)
        s->uses++;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->page_count; i++) {
            uint32_t index = a->first_page + i;
            if (core->pages[index].holds > 0 || !(s->flags[index] & KEPT))
                continue;
            if (s->flags[index] & UNPAID)
                forget(core, index);
            else
                make_youngest(s, index);
        }
    }
}

/* The page is about to be written: it gets dirty on both sides, and page_relist() follows. */
void shadow_written(pagert_core *core, uint32_t index)
{
    shadow *s = shadow_of(core);
    if (!(s->flags[index] & KEPT))
        return;
    s->unpaid -= (s->flags[index] & UNPAID) != 0;
    s->flags[index] = (uint8_t)((s->flags[index] & ~UNPAID) | DIRTY);
}

void shadow_not_overwritten(pagert_core *core, uint32_t index)
{
    shadow *s = shadow_of(core);
    if (!(s->flags[index] & UNPAID))
        return;
    s->flags[index] &= (uint8_t)~UNPAID;
    s->unpaid--;
    if (!has(&core->pages[index], PAGE_ZERO))
        pay(core);
}

void shadow_sent_away(pagert_core *core, uint32_t index)
{
    if (shadow_of(core)->flags[index] & KEPT)
        evict(core, index);
}

/* O(device frames), as a flush is. */
void shadow_flushed(pagert_core *core)
{
    shadow *s = shadow_of(core);
    for (uint32_t index = s->kept.oldest; index != NONE; index = s->links[index].younger) {
        if (!(s->flags[index] & DIRTY) || core->pages[index].holds > 0)
            continue;
        s->flags[index] &= (uint8_t)~DIRTY;
        pay(core);
        shadow_changed(core, index);
    }
}

void shadow_copy_lost(pagert_core *core, uint32_t index)
{
    shadow *s = shadow_of(core);
    if (s->flags[index] & KEPT)
        s->flags[index] |= DIRTY;
    else
        s->excused++;
}

void shadow_transferred(pagert_core *core, uint32_t link, uint32_t page_count)
{
    if (crosses_border(link))
        shadow_of(core)->moved += page_count;
}

static bool affords(const shadow *s, uint64_t price)
{
    return 100 * (s->moved + s->due + price) <= LIMIT_PERCENT * s->lru_moved + 100 * s->excused;
}

/* The page's writeback, if that is not due already. */
static uint32_t price_of_cleaning(const pagert_core *core, uint32_t index)
{
    return (shadow_of(core)->flags[index] & DIRTY) && !is_clean(&core->pages[index]) ? 1 : 0;
}

bool shadow_affords_cleaning(const pagert_core *core, uint32_t index)
{
    return affords(shadow_of(core), price_of_cleaning(core, index));
}

/* Its fetch, if LRU would find it here, and its writeback. */
bool shadow_affords_leaving(const pagert_core *core, uint32_t index, victim_need need)
{
    const shadow *s = shadow_of(core);
    uint64_t price = (s->flags[index] & KEPT) && !has(&core->pages[index], PAGE_ZERO) ? 1 : 0;
    price += price_of_cleaning(core, index);
    return affords(s, need.time != 0 ? s->intended + price : price);
}

bool shadow_affords_fetch(pagert_core *core, uint32_t first_page, uint32_t page_count)
{
    shadow *s = shadow_of(core);
    s->intended = 0;
    for (uint32_t i = 0; i < page_count; i++) {
        const page *p = &core->pages[first_page + i];
        if (p->copy[PAGERT_DEVICE] == COPY_NONE && !has(p, PAGE_ZERO))
            s->intended += !(s->flags[first_page + i] & KEPT); /* else it is due already */
    }
    return affords(s, s->intended);
}

const page_list *shadow_spares(const pagert_core *core) { return &shadow_of(core)->spares; }

uint32_t shadow_victim(pagert_core *core, victim_need need)
{
    shadow *s = shadow_of(core);
    if (need.time != 0)
        return NONE;
    uint32_t index = s->spares.oldest;
    while (index != NONE && need.clean_only && !is_clean(&core->pages[index]))
        index = s->links[index].younger;
    if (index != NONE || need.optional || (!need.clean_only && !is_quiet(core)))
        return index;
    for (index = s->kept.oldest; index != NONE; index = s->links[index].younger) {
        const page *p = &core->pages[index];
        if (has(p, PAGE_EVICTABLE) && (!need.clean_only || is_clean(p))) {
            evict(core, index);
            return index;
        }
    }
    return NONE;
}

#define CHECK(condition)     \
    do {                     \
        if (!(condition))    \
            return __LINE__; \
    } while (0)

static int check_list(const pagert_core *core, const page_list *list, uint32_t flag)
{
    const shadow *s = shadow_of(core);
    uint32_t count = 0, previous = NONE;
    for (uint32_t index = list->oldest; index != NONE; index = s->links[index].younger) {
        CHECK((s->flags[index] & (KEPT | SPARE)) == flag);
        CHECK(s->links[index].older == previous && ++count <= list->count);
        previous = index;
    }
    CHECK(count == list->count && list->youngest == previous);
    return 0;
}

/* Everything counted anew, and the rule itself. */
int shadow_check(const pagert_core *core)
{
    const shadow *s = shadow_of(core);
    uint64_t due = 0;
    uint32_t kept = 0, spares = 0, unpaid = 0;
    int line;
    if ((line = check_list(core, &s->kept, KEPT)) || (line = check_list(core, &s->spares, SPARE)))
        return line;
    for (uint32_t index = 0; index < core->config.page_count; index++) {
        const page *p = &core->pages[index];
        uint32_t flags = s->flags[index];
        if (!has(p, PAGE_LIVE)) {
            CHECK(flags == 0);
            continue;
        }
        CHECK(!(flags & (DIRTY | UNPAID)) || (flags & KEPT));
        CHECK(!(flags & UNPAID) || p->holds > 0);
        CHECK((flags & KEPT) || p->holds == 0 || has(p, PAGE_FAILED));
        CHECK(!(flags & SPARE) == !(has(p, PAGE_EVICTABLE) && !(flags & KEPT)));
        CHECK(flags >> DUE_SHIFT == due_for(p, flags));
        due += flags >> DUE_SHIFT;
        kept += flags & KEPT;
        spares += (flags & SPARE) != 0;
        unpaid += (flags & UNPAID) != 0;
    }
    CHECK(due == s->due && unpaid == s->unpaid);
    CHECK(kept == s->kept.count && spares == s->spares.count);
    CHECK(kept <= core->config.frame_count[PAGERT_DEVICE]);
    CHECK(100 * (s->moved + s->due) <= LIMIT_PERCENT * s->lru_moved + 100 * s->excused);
    return 0;
}

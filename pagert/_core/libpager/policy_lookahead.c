/* SPDX-License-Identifier: Apache-2.0
 *
 * lookahead: the victim is the page whose next use is furthest, weighed by what its eviction costs; and the
 * next pages to come are fetched before they are asked for.
 *
 * Evicting the page that is used furthest in the future is optimal where every eviction costs one fetch
 * (Belady, IBM Systems Journal 5(2), 1966). Here it costs between nothing and two transfers, so evictable
 * pages stand in one heap for each price, furthest use first, and the heaps' tops are compared by time
 * until use for each transfer paid. A page of which no use is known is evicted first where the prediction is
 * trusted, and stands on a list in order of last use for when it is not: then this is LRU.
 *
 * A key is a time on the history's clock. It stays true while things go as predicted. After a jump of the
 * cursor all are set anew, a few with each access, and a victim's is checked in any case. One more is looked
 * at with every access, in turn: a page whose predicted use never came would otherwise stay for ever.
 */
#include "history.h"
#include "list.h"
#include "shadow.h"

/* Where an evictable page stands, in its `failed_link`: that is free while no pin holds the page. */
enum {
    PRICE_NOTHING, /* clean, and overwritten or released next */
    PRICE_ONE,     /* one transfer: clean and read next, or dirty and overwritten or released next */
    PRICE_TWO,     /* dirty and read next: written now, read then */
    HEAPS,
    UNKNOWN = HEAPS, /* no use known: on the list */
    PRICE_MASK = 3,
    PRICED_CLEAN = 4, /* it was clean then */
};

enum {
    RECHECKS_MAX = 16,
    REFRESHED_PER_ACCESS = 8,
    AHEAD_SHARE = 16, /* prefetch looks at events whose pages fill this part of the device */
};

/* Max-heap of pages by time of next use. links[LIST_POLICY]: older is the place in it, younger the time. */
typedef struct heap {
    uint32_t *pages;
    uint32_t count;
} heap;

typedef struct lookahead {
    history past;
    heap heaps[HEAPS];
    page_list unknown;
    uint32_t behind;      /* the cursor when `ahead_pages` was counted */
    uint32_t ahead;       /* next event of the past to prefetch for */
    uint64_t ahead_pages; /* pages of the events after `behind` and before `ahead` */
    uint32_t ahead_epoch; /* of the history when `ahead` was set */
    uint32_t key_epoch;   /* likewise when the last keys were set anew */
    uint32_t refreshed;   /* device frames whose page's key was set anew since then */
    shadow lru;           /* keeps wrong predictions from costing much: see shadow.h */
} lookahead;

static lookahead *state_of(const pagert_pager *pager) { return pager->policy_state; }

static uint64_t heap_bytes(const pagert_config *config)
{
    return (uint64_t)config->frame_count[PAGERT_DEVICE] * sizeof(uint32_t);
}

static uint64_t state_bytes(const pagert_config *config)
{
    return sizeof(lookahead) + 64 + HEAPS * heap_bytes(config) + history_bytes() +
           shadow_bytes(config);
}

static void init(pagert_pager *pager)
{
    lookahead *state = state_of(pager);
    unsigned char *memory = (unsigned char *)state + (sizeof(lookahead) + 63) / 64 * 64;
    history_init(&state->past, memory);
    memory += history_bytes();
    for (uint32_t price = 0; price < HEAPS; price++) {
        state->heaps[price].pages = (uint32_t *)(void *)memory;
        memory += heap_bytes(&pager->config);
    }
    list_init(&state->unknown);
    shadow_init(pager, &state->lru, memory);
}

static uint32_t *place_of(pagert_pager *pager, uint32_t index)
{
    return &pager->pages[index].links[LIST_POLICY].older;
}

static uint32_t *time_of(pagert_pager *pager, uint32_t index)
{
    return &pager->pages[index].links[LIST_POLICY].younger;
}

static void put(pagert_pager *pager, heap *h, uint32_t place, uint32_t index)
{
    h->pages[place] = index;
    *place_of(pager, index) = place;
}

static void sift_up(pagert_pager *pager, heap *h, uint32_t place)
{
    uint32_t index = h->pages[place], time = *time_of(pager, index);
    while (place > 0) {
        uint32_t parent = (place - 1) / 2;
        if (*time_of(pager, h->pages[parent]) >= time)
            break;
        put(pager, h, place, h->pages[parent]);
        place = parent;
    }
    put(pager, h, place, index);
}

static void sift_down(pagert_pager *pager, heap *h, uint32_t place)
{
    uint32_t index = h->pages[place], time = *time_of(pager, index);
    for (;;) {
        uint32_t child = 2 * place + 1;
        if (child >= h->count)
            break;
        if (child + 1 < h->count && *time_of(pager, h->pages[child + 1]) > *time_of(pager, h->pages[child]))
            child++;
        if (*time_of(pager, h->pages[child]) <= time)
            break;
        put(pager, h, place, h->pages[child]);
        place = child;
    }
    put(pager, h, place, index);
}

/* The price of evicting the page and the time of its next use; UNKNOWN if none is known. */
static uint32_t appraise(const pagert_pager *pager, uint32_t index, uint32_t *time)
{
    const page *p = &pager->pages[index];
    use next;
    if (!history_next_use(&state_of(pager)->past, p->region, index - p->region, &next))
        return UNKNOWN;
    *time = next.time;
    bool read_next = next.kind == EVENT_READ || next.kind == EVENT_UPDATE;
    return is_clean(p) ? (read_next && !has(p, PAGE_ZERO) ? PRICE_ONE : PRICE_NOTHING)
                       : (read_next ? PRICE_TWO : PRICE_ONE);
}

static void insert(pagert_pager *pager, uint32_t index)
{
    lookahead *state = state_of(pager);
    uint32_t time = 0, price = appraise(pager, index, &time);
    pager->pages[index].failed_link = (price | (is_clean(&pager->pages[index]) ? PRICED_CLEAN : 0)) & 15;
    if (price == UNKNOWN) {
        list_append(pager, &state->unknown, LIST_POLICY, index);
        return;
    }
    heap *h = &state->heaps[price];
    *time_of(pager, index) = time;
    put(pager, h, h->count++, index);
    sift_up(pager, h, h->count - 1);
}

static void remove_page(pagert_pager *pager, uint32_t index)
{
    lookahead *state = state_of(pager);
    uint32_t price = pager->pages[index].failed_link & PRICE_MASK;
    if (price == UNKNOWN) {
        list_remove(pager, &state->unknown, LIST_POLICY, index);
        return;
    }
    heap *h = &state->heaps[price];
    uint32_t place = *place_of(pager, index), last = h->pages[--h->count];
    if (last == index)
        return;
    put(pager, h, place, last);
    sift_up(pager, h, place);
    sift_down(pager, h, *place_of(pager, last));
}

static void reprice(pagert_pager *pager, uint32_t index)
{
    remove_page(pager, index);
    insert(pager, index);
}

static void changed(pagert_pager *pager, uint32_t index)
{
    const page *p = &pager->pages[index];
    if (is_clean(p) != ((p->failed_link & PRICED_CLEAN) != 0))
        reprice(pager, index);
}

static uint32_t evictable_count(const pagert_pager *pager)
{
    const lookahead *state = state_of(pager);
    uint32_t count = state->unknown.count;
    for (uint32_t price = 0; price < HEAPS; price++)
        count += state->heaps[price].count;
    return count;
}

static uint32_t wait_until(const lookahead *state, uint32_t time)
{
    return time > state->past.now ? time - state->past.now : 0;
}

/* The heap whose top is the best victim: the longest time until use for each transfer paid. */
static uint32_t best_heap(pagert_pager *pager, bool clean_only)
{
    lookahead *state = state_of(pager);
    uint32_t best = HEAPS;
    uint64_t best_worth = 0;
    for (uint32_t price = 0; price < HEAPS; price++) {
        const heap *h = &state->heaps[price];
        if (h->count == 0 || (clean_only && !is_clean(&pager->pages[h->pages[0]])))
            continue;
        if (price == PRICE_NOTHING)
            return price;
        uint64_t worth = (uint64_t)wait_until(state, *time_of(pager, h->pages[0])) * 2 / price + 1;
        if (worth > best_worth) {
            best = price;
            best_worth = worth;
        }
    }
    return best;
}

/* A clean page anywhere, for when nothing can be written back. O(pages), and rare. */
static uint32_t any_clean(pagert_pager *pager)
{
    lookahead *state = state_of(pager);
    for (uint32_t index = state->unknown.oldest; index != NONE;
         index = pager->pages[index].links[LIST_POLICY].younger)
        if (is_clean(&pager->pages[index]))
            return index;
    for (uint32_t price = 0; price < HEAPS; price++)
        for (uint32_t i = 0; i < state->heaps[price].count; i++)
            if (is_clean(&pager->pages[state->heaps[price].pages[i]]))
                return state->heaps[price].pages[i];
    return NONE;
}

/* The one that the prediction makes the best, whatever it costs should that be wrong. */
static uint32_t foreseen_victim(pagert_pager *pager, bool clean_only)
{
    lookahead *state = state_of(pager);
    bool sure = history_is_sure(&state->past);
    for (uint32_t checks = 0; sure && checks < RECHECKS_MAX && state->unknown.count > 0; checks++) {
        uint32_t index = state->unknown.oldest, time;
        if (clean_only && !is_clean(&pager->pages[index]))
            break;
        if (appraise(pager, index, &time) == UNKNOWN)
            return index;
        reprice(pager, index);
    }
    for (uint32_t checks = 0; checks < RECHECKS_MAX; checks++) {
        uint32_t price = best_heap(pager, clean_only);
        if (price == HEAPS)
            break;
        uint32_t index = state->heaps[price].pages[0], time = 0;
        uint32_t price_now = appraise(pager, index, &time);
        if (price_now == price && time == *time_of(pager, index))
            return pager->needed_before < time || !pager->look_ahead_only ? index : NONE;
        reprice(pager, index);
    }
    if (pager->look_ahead_only)
        return NONE;
    uint32_t index = state->unknown.oldest;
    if (index != NONE && (!clean_only || is_clean(&pager->pages[index])))
        return index;
    uint32_t price = best_heap(pager, clean_only);
    return price != HEAPS ? state->heaps[price].pages[0] : clean_only ? any_clean(pager) : NONE;
}

/* Pages that LRU would have evicted may leave at any time. Of the one that it did first and the one that it did
 * last: what is used later. The latter where it is a loop that LRU is bad at. */
static uint32_t later_spare(pagert_pager *pager)
{
    uint32_t first = shadow_spares(pager)->oldest, last = shadow_spares(pager)->youngest;
    if (first == NONE)
        return NONE;
    uint32_t time_of_first = NONE, time_of_last = NONE;
    appraise(pager, first, &time_of_first);
    appraise(pager, last, &time_of_last);
    if (time_of_last > time_of_first) {
        first = last;
        time_of_first = time_of_last;
    }
    return pager->needed_before < time_of_first || !pager->look_ahead_only ? first : NONE;
}

static uint32_t victim(pagert_pager *pager, bool clean_only)
{
    uint32_t index = foreseen_victim(pager, clean_only);
    if (index == NONE || shadow_affords(pager, shadow_price_of_leaving(pager, index)))
        return index;
    index = clean_only ? NONE : later_spare(pager);
    return index != NONE ? index : shadow_victim(pager, clean_only);
}

/* After a jump of the cursor: set the keys anew, step by step. */
static void refresh(pagert_pager *pager)
{
    lookahead *state = state_of(pager);
    uint32_t frame_count = pager->config.frame_count[PAGERT_DEVICE];
    if (state->key_epoch != state->past.epoch) {
        state->key_epoch = state->past.epoch;
        state->refreshed = 0;
    }
    uint32_t count = state->refreshed < frame_count ? REFRESHED_PER_ACCESS : 1;
    for (uint32_t k = 0; k < count; k++) {
        uint32_t index = pager->frames[state->refreshed++ % frame_count].page;
        if (index != NONE && has(&pager->pages[index], PAGE_EVICTABLE))
            reprice(pager, index);
    }
    if (state->refreshed == 2 * frame_count)
        state->refreshed = frame_count;
}

static void accessed(pagert_pager *pager, const pagert_pin *pin)
{
    lookahead *state = state_of(pager);
    refresh(pager);
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        history_access(&state->past, a->region.first_page, a->first_page - a->region.first_page,
                       a->page_count, a->mode);
    }
}

static void reserved(pagert_pager *pager, uint32_t first_page, uint32_t page_count)
{
    history_reserve(&state_of(pager)->past, first_page, page_count);
}

static void released(pagert_pager *pager, uint32_t first_page)
{
    history_release(&state_of(pager)->past, first_page);
}

/* Pages that an event brings to the device. */
static uint32_t pages_of(const event *e)
{
    return e->kind <= EVENT_OVERWRITE ? e->count : 0;
}

/* Follow the cursor with the window of events that prefetch looks at. */
static void follow_cursor(lookahead *state)
{
    history *past = &state->past;
    if (state->ahead_epoch != past->epoch || state->ahead <= past->cursor) {
        state->behind = past->cursor;
        state->ahead = past->cursor + 1;
        state->ahead_pages = 0;
        state->ahead_epoch = past->epoch;
    }
    while (state->behind < past->cursor)
        state->ahead_pages -= pages_of(history_event(past, ++state->behind));
}

/* The next range to fetch: `first_page` and `page_count`, wanted at `time`. False: none is known, or it lies
 * so far ahead that its frames serve better where they are: what is fetched early shrinks the cache, and
 * with it what the furthest-use rule can save. */
static bool upcoming(pagert_pager *pager, uint32_t *first_page, uint32_t *page_count, uint32_t *time)
{
    lookahead *state = state_of(pager);
    history *past = &state->past;
    if (!history_is_sure(past))
        return false;
    follow_cursor(state);
    uint64_t window = 1 + pager->config.frame_count[PAGERT_DEVICE] / AHEAD_SHARE;
    for (; state->ahead < past->now && state->ahead_pages < window; state->ahead++) {
        const event *e = history_event(past, state->ahead);
        state->ahead_pages += pages_of(e);
        if ((e->kind != EVENT_READ && e->kind != EVENT_UPDATE) || e->role == NONE)
            continue;
        uint32_t first = past->roles[e->role].first_page;
        if (first == NONE) /* not allocated yet: it will be zero pages */
            continue;
        const page *head = &pager->pages[first];
        if (e->offset >= head->page_count || e->count > head->page_count - e->offset)
            continue;
        for (uint32_t i = 0; i < e->count; i++) {
            const page *p = &pager->pages[first + e->offset + i];
            if (p->copy[PAGERT_DEVICE] != COPY_NONE || has(p, PAGE_ZERO))
                continue;
            *first_page = first + e->offset;
            *page_count = e->count;
            *time = past->now - 1 + (state->ahead - past->cursor);
            state->ahead_pages -= pages_of(e); /* it is looked at again */
            return shadow_affords_fetch(pager, *first_page, *page_count);
        }
    }
    return false;
}

const pagert_policy *pagert_policy_lookahead(void)
{
    static const pagert_policy table = {
        .name = "lookahead",
        .state_bytes = state_bytes,
        .init = init,
        .insert = insert,
        .remove = remove_page,
        .victim = victim,
        .evictable_count = evictable_count,
        .changed = changed,
        .accessed = accessed,
        .reserved = reserved,
        .released = released,
        .upcoming = upcoming,
    };
    return &table;
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * lookahead: the victim is a page that the plan lets go, else the one whose next use is furthest, weighed by
 * what its eviction costs; and the next pages to come are fetched before they are asked for.
 *
 * Evicting the page that is used furthest in the future is optimal where every eviction costs one fetch
 * (Belady, IBM Systems Journal 5(2), 1966). Here it costs between nothing and two transfers, so evictable
 * pages stand in one heap for each price, furthest use first, and the heaps' tops are compared by time
 * until use for each transfer paid. Once a step has repeated, the plan says which pages are better let go
 * between two uses (plan.h): they stand in heaps of their own, and go first. A page of which no use is known
 * is evicted before all where the prediction is trusted, and stands on a list in order of last use for when it
 * is not: then this is LRU.
 *
 * A key is a time on the history's clock. It stays true while things go as predicted. After a jump of the
 * cursor all are set anew, a few with each access, and a victim's is checked in any case. One more is looked
 * at with every access, in turn: a page whose predicted use never came would otherwise stay for ever.
 */
#include "heap.h"
#include "history.h"
#include "host_order.h"
#include "list.h"
#include "plan.h"
#include "shadow.h"

/* Where an evictable page stands: its `standing`. */
enum {
    GOES_FREE,  /* costs nothing: clean, and overwritten or released next */
    GOES_CLEAN, /* planned to go, and clean */
    GOES_DIRTY, /* planned to go, and better written before its frame is asked for */
    STAYS_ONE,  /* one transfer: clean and read next, or dirty and overwritten or released next */
    STAYS_TWO,  /* dirty and read next: written now, read then */
    HEAPS,
    UNKNOWN = HEAPS, /* no use known: on the list */
    STANDING_MASK = 7,
    WAS_CLEAN = 8, /* when it came to stand there */
};

enum {
    RECHECKS_MAX = 32,
    REFRESHED_PER_ACCESS = 8,
    AHEAD_SHARE = 16,       /* this part of the device is for pages fetched ahead */
    NEAR_SHARE = 32,        /* what is so few pages ahead is fetched whatever has to go */
    SEEN_SHARE = 4,         /* what comes is looked at while its pages, fetched or not, are at most this part */
    SLACK_SHARE = 64,       /* of the time until the best victim's use: see is_as_good() */
    PLAN_STEPS = 1024,      /* of the plan, with each access */
};

typedef struct lookahead {
    shadow lru; /* keeps wrong predictions from costing much; first, as shadow.h wants it */
    history past;
    plan next;
    heap heaps[HEAPS];
    page_list unknown;
    host_order below;
    uint32_t behind;      /* the cursor when `ahead_pages` was counted */
    uint32_t ahead;       /* next event of the past to prefetch for */
    uint64_t ahead_pages; /* pages of the events after `behind` and before `ahead`, */
    uint64_t ahead_fetched; /* and of these, pages that were fetched for them */
    uint32_t ahead_missing; /* pages that upcoming() found missing */
    uint32_t ahead_epoch; /* of the history when `ahead` was set */
    uint32_t key_epoch;   /* likewise when the last keys were set anew */
    uint32_t refreshed;   /* device frames whose page's key was set anew since then */
    bool fetches_ahead;   /* somebody has asked what comes: frames are set aside for it */
    uint32_t last_victim; /* or NONE */
    uint32_t looked_up;   /* first page of the region of `found`, which was true at `looked_up_at` */
    uint32_t looked_up_at, looked_up_epoch;
    use found;
} lookahead;

static lookahead *state_of(const pagert_core *core) { return core->policy_state; }

static uint64_t state_bytes(const pagert_config *config)
{
    return sizeof(lookahead) + 64 + HEAPS * heap_bytes(config, PAGERT_DEVICE) + plan_bytes() + history_bytes() +
           host_order_bytes(config) + shadow_bytes(config);
}

static void init(pagert_core *core)
{
    lookahead *state = state_of(core);
    unsigned char *memory = (unsigned char *)state + (sizeof(lookahead) + 63) / 64 * 64;
    history_init(&state->past, memory);
    memory += history_bytes();
    plan_init(&state->next, memory);
    memory += plan_bytes();
    for (uint32_t standing = 0; standing < HEAPS; standing++) {
        state->heaps[standing].items = (heap_item *)(void *)memory;
        memory += heap_bytes(&core->config, PAGERT_DEVICE);
    }
    host_order_init(&state->below, &core->config, memory);
    list_init(&state->unknown);
    state->looked_up = state->last_victim = NONE;
    shadow_init(core, memory + host_order_bytes(&core->config));
}

/* The next use of a page, or NULL. Pages of one access are asked for one after the other: the last answer is
 * kept, with the pages for which it holds. */
static const use *next_use(const pagert_core *core, uint32_t index)
{
    lookahead *state = state_of(core);
    const history *past = &state->past;
    uint32_t first = core->pages[index].region, offset = index - first;
    if (state->looked_up != first || state->looked_up_at != past->now ||
        state->looked_up_epoch != past->epoch || offset < state->found.from || offset >= state->found.to) {
        history_next_use(past, first, offset, &state->found);
        state->looked_up = first;
        state->looked_up_at = past->now;
        state->looked_up_epoch = past->epoch;
    }
    return state->found.event != NULL ? &state->found : NULL;
}

/* Whether what happens then has been fetched ahead or found resident; or is what is fetched now. */
static bool is_fetched_ahead(const lookahead *state, uint32_t time)
{
    const history *past = &state->past;
    return state->ahead_epoch == past->epoch && state->ahead > past->cursor &&
           time <= past->now - 1 + (state->ahead - past->cursor);
}

/* Whether the plan has the page leave before its next use. */
static bool goes(const lookahead *state, const use *next, uint32_t offset)
{
    const event *e = next->event;
    uint32_t nth = e->kind == EVENT_RELEASE ? offset : offset - e->offset;
    return !is_fetched_ahead(state, next->time) && e->keep < KEEP_ALL && nth >= e->keep;
}

/* Where the page belongs, and the time of its next use if that is known. */
static uint32_t appraise(const pagert_core *core, uint32_t index, uint32_t *time)
{
    const page *p = &core->pages[index];
    const use *next = next_use(core, index);
    if (next == NULL)
        return UNKNOWN;
    *time = next->time;
    bool clean = is_clean(p);
    bool read_next = next->event->kind == EVENT_READ || next->event->kind == EVENT_UPDATE;
    if (clean && (!read_next || has(p, PAGE_ZERO)))
        return GOES_FREE;
    if (goes(state_of(core), next, index - p->region))
        return clean ? GOES_CLEAN : GOES_DIRTY;
    return clean || !read_next ? STAYS_ONE : STAYS_TWO;
}

static void insert(pagert_core *core, uint32_t index)
{
    lookahead *state = state_of(core);
    uint32_t time = 0, standing = appraise(core, index, &time);
    core->pages[index].standing = (standing | (is_clean(&core->pages[index]) ? WAS_CLEAN : 0)) & 15;
    if (standing == UNKNOWN)
        list_append(core, &state->unknown, LIST_POLICY, index);
    else
        heap_push(core, &state->heaps[standing], index, time);
}

static void remove_page(pagert_core *core, uint32_t index)
{
    lookahead *state = state_of(core);
    uint32_t standing = core->pages[index].standing & STANDING_MASK;
    if (standing == UNKNOWN)
        list_remove(core, &state->unknown, LIST_POLICY, index);
    else
        heap_remove(core, &state->heaps[standing], index);
}

/* Put the page where it belongs now. True if it stood there. */
static bool reappraise(pagert_core *core, uint32_t index)
{
    uint32_t standing = core->pages[index].standing & STANDING_MASK, time = 0;
    if (appraise(core, index, &time) == standing &&
        (standing == UNKNOWN || time == heap_time(core, &state_of(core)->heaps[standing], index)))
        return true;
    remove_page(core, index);
    insert(core, index);
    return false;
}

static void changed(pagert_core *core, uint32_t index)
{
    const page *p = &core->pages[index];
    if (has(p, PAGE_EVICTABLE) && is_clean(p) != ((p->standing & WAS_CLEAN) != 0)) {
        remove_page(core, index);
        insert(core, index);
    }
    shadow_changed(core, index);
}

static uint32_t evictable_count(const pagert_core *core)
{
    const lookahead *state = state_of(core);
    uint32_t count = state->unknown.count;
    for (uint32_t standing = 0; standing < HEAPS; standing++)
        count += state->heaps[standing].count;
    return count;
}

static bool has_top(const pagert_core *core, const heap *h, bool clean_only)
{
    return h->count > 0 && (!clean_only || is_clean(&core->pages[h->items[0].page]));
}

/* The heap whose top is the best victim: what costs nothing, what is to go, what stays clear longest for each
 * transfer paid. HEAPS if there is none. */
static uint32_t best_heap(const pagert_core *core, bool clean_only)
{
    const lookahead *state = state_of(core);
    for (uint32_t standing = GOES_FREE; standing <= GOES_DIRTY; standing++)
        if (has_top(core, &state->heaps[standing], clean_only))
            return standing;
    uint32_t best = HEAPS;
    uint64_t best_worth = 0;
    for (uint32_t standing = STAYS_ONE; standing <= STAYS_TWO; standing++) {
        const heap *h = &state->heaps[standing];
        if (!has_top(core, h, clean_only))
            continue;
        uint64_t wait = h->items[0].time > state->past.now ? h->items[0].time - state->past.now : 0;
        uint64_t worth = wait * 2 / (standing == STAYS_ONE ? 1 : 2) + 1;
        if (worth > best_worth) {
            best = standing;
            best_worth = worth;
        }
    }
    return best;
}

/* A clean page anywhere, for when nothing can be written back. O(pages), and rare. */
static uint32_t any_clean(const pagert_core *core)
{
    const lookahead *state = state_of(core);
    for (uint32_t index = state->unknown.oldest; index != NONE;
         index = core->pages[index].links[LIST_POLICY].younger)
        if (is_clean(&core->pages[index]))
            return index;
    for (uint32_t standing = 0; standing < HEAPS; standing++)
        for (uint32_t i = 0; i < state->heaps[standing].count; i++)
            if (is_clean(&core->pages[state->heaps[standing].items[i].page]))
                return state->heaps[standing].items[i].page;
    return NONE;
}

/* The plan knows what follows the last event. */
static bool is_planned(const lookahead *state)
{
    const history *past = &state->past;
    return past->cursor != NONE && history_event(past, past->cursor)->keep != NONE;
}

/* What is fetched ahead takes no frame from what is needed before; nor from what is planned to stay, unless it comes
 * so soon that its operator would have to take that frame a moment later, and wait. */
static bool may_go(const pagert_core *core, uint32_t standing, uint32_t time, victim_need need)
{
    if (need.time != 0 && need.time >= time)
        return false;
    bool is_near = state_of(core)->ahead_pages < core->config.frame_count[PAGERT_DEVICE] / NEAR_SHARE;
    bool spare_planned = (need.time != 0 && !is_near) || need.optional;
    return !spare_planned || standing < STAYS_ONE || !is_planned(state_of(core));
}

/* Whether the page is as good a victim as the best one. Windows of several pages are as good as equal where
 * one is used a little sooner: that costs less than to take pages from everywhere, since what remains of a
 * window that lost some has to move when it is needed again. */
static bool is_as_good(pagert_core *core, uint32_t index, uint32_t standing, heap_item best)
{
    const lookahead *state = state_of(core);
    const page *p = &core->pages[index];
    if (!has(p, PAGE_EVICTABLE) || (p->standing & STANDING_MASK) != standing || !reappraise(core, index))
        return false;
    uint32_t time = heap_time(core, &state->heaps[standing], index);
    uint32_t slack = next_use(core, index)->event->count > 1 && best.time > state->past.now
                         ? (best.time - state->past.now) / SLACK_SHARE
                         : 0;
    return time + slack >= best.time;
}

/* A victim as good as the best one: the neighbour of the last victim, so that a window that lost a page loses
 * all before another loses any; else the first page of the best one's window. */
static uint32_t in_order(pagert_core *core, uint32_t standing, heap_item best)
{
    lookahead *state = state_of(core);
    uint32_t next = state->last_victim + 1, region = core->pages[best.page].region;
    if (next != 0 && next < core->config.page_count && !has(&core->pages[next], PAGE_HEAD) &&
        is_as_good(core, next, standing, best))
        return next;
    uint32_t first = best.page;
    while (first > region && is_as_good(core, first - 1, standing, best))
        first--;
    return first;
}

/* The one that the prediction makes the best, whatever it costs should that be wrong. */
static uint32_t foreseen_victim(pagert_core *core, victim_need need)
{
    lookahead *state = state_of(core);
    bool sure = history_is_sure(&state->past);
    for (uint32_t checks = 0; sure && checks < RECHECKS_MAX && state->unknown.count > 0; checks++) {
        uint32_t index = state->unknown.oldest;
        if (need.clean_only && !is_clean(&core->pages[index]))
            break;
        if (reappraise(core, index))
            return index;
    }
    for (uint32_t checks = 0; checks < RECHECKS_MAX; checks++) {
        uint32_t standing = best_heap(core, need.clean_only);
        if (standing == HEAPS)
            break;
        heap_item top = state->heaps[standing].items[0];
        if (!reappraise(core, top.page))
            continue;
        if (!may_go(core, standing, top.time, need))
            return NONE;
        return need.clean_only ? top.page : (state->last_victim = in_order(core, standing, top));
    }
    if (need.time != 0)
        return NONE;
    uint32_t index = state->unknown.oldest;
    if (index != NONE && (!need.clean_only || is_clean(&core->pages[index])))
        return index;
    uint32_t standing = best_heap(core, need.clean_only);
    return standing != HEAPS ? state->heaps[standing].items[0].page : need.clean_only ? any_clean(core) : NONE;
}

/* Pages that LRU would have evicted may leave at any time. Of the one that it did first and the one that it did
 * last: what is used later. The latter where it is a loop that LRU is bad at. */
static uint32_t later_spare(pagert_core *core, victim_need need)
{
    uint32_t first = shadow_spares(core)->oldest, last = shadow_spares(core)->youngest;
    if (first == NONE)
        return NONE;
    uint32_t time_of_first = NONE, time_of_last = NONE;
    appraise(core, first, &time_of_first);
    appraise(core, last, &time_of_last);
    if (time_of_last > time_of_first) {
        first = last;
        time_of_first = time_of_last;
    }
    return need.time == 0 || need.time < time_of_first ? first : NONE;
}

static uint32_t victim(pagert_core *core, victim_need need)
{
    uint32_t index = foreseen_victim(core, need);
    if (index == NONE || shadow_affords_leaving(core, index, need))
        return index;
    index = need.clean_only ? NONE : later_spare(core, need);
    return index != NONE ? index : shadow_victim(core, need);
}

/* Where only reads repeat, no write takes a link's time, and half of it will do. */
static uint32_t ahead_pages_max(const pagert_core *core)
{
    uint32_t share = state_of(core)->next.written ? AHEAD_SHARE : 2 * AHEAD_SHARE;
    return 1 + core->config.frame_count[PAGERT_DEVICE] / share;
}

/* A page that goes without a transfer, and is planned to, may go at once: what comes next then finds free frames
 * in one run, where it would find pages of others in between. */
static uint32_t leaver(pagert_core *core)
{
    lookahead *state = state_of(core);
    if (!is_planned(state) || !history_is_sure(&state->past))
        return NONE;
    for (uint32_t standing = GOES_FREE; standing <= GOES_CLEAN; standing++) {
        const heap *h = &state->heaps[standing];
        for (uint32_t checks = 0; checks < RECHECKS_MAX && h->count > 0; checks++) {
            uint32_t index = h->items[0].page;
            if (!reappraise(core, index))
                continue;
            if (core->pages[index].queue == QUEUE_NONE && shadow_affords_leaving(core, index, (victim_need){0}))
                return index;
            break;
        }
    }
    return NONE;
}

/* A dirty page that is planned to go and stands in no queue: it can be written while the links are idle, and
 * its frame is there at once when it is asked for. Near the top they are nearly in order. */
static uint32_t writable(pagert_core *core)
{
    const heap *h = &state_of(core)->heaps[GOES_DIRTY];
    for (uint32_t i = 0; i < RECHECKS_MAX && i < h->count; i++) {
        uint32_t index = h->items[i].page;
        if (core->pages[index].queue == QUEUE_NONE && shadow_affords_cleaning(core, index))
            return reappraise(core, index) ? index : NONE;
    }
    return NONE;
}

static void host_insert(pagert_core *core, uint32_t index)
{
    host_order_insert(core, &state_of(core)->below, &state_of(core)->past, index);
}

static void host_remove(pagert_core *core, uint32_t index)
{
    host_order_remove(core, &state_of(core)->below, index);
}

static uint32_t host_victim(pagert_core *core)
{
    return host_order_victim(core, &state_of(core)->below, &state_of(core)->past);
}

/* After a jump of the cursor: set the keys anew, step by step. */
static void refresh(pagert_core *core)
{
    lookahead *state = state_of(core);
    uint32_t frame_count = core->config.frame_count[PAGERT_DEVICE];
    if (state->key_epoch != state->past.epoch) {
        state->key_epoch = state->past.epoch;
        state->refreshed = 0;
    }
    uint32_t count = state->refreshed < frame_count ? REFRESHED_PER_ACCESS : 1;
    for (uint32_t k = 0; k < count; k++) {
        uint32_t index = core->frames[state->refreshed++ % frame_count].page;
        if (index != NONE && has(&core->pages[index], PAGE_EVICTABLE))
            reappraise(core, index);
    }
    if (state->refreshed == 2 * frame_count)
        state->refreshed = frame_count;
}

static void go_on_planning(pagert_core *core, uint32_t accesses)
{
    lookahead *state = state_of(core);
    if (plan_is_due(&state->next, &state->past)) {
        uint32_t room = core->config.frame_count[PAGERT_DEVICE];
        /* What is fetched ahead is seldom all there at once: half of its frames do. */
        uint32_t aside = state->fetches_ahead ? room / AHEAD_SHARE / 2 : 0;
        state->past.unplanned = 0;
        plan_begin(&state->next, &state->past, room > aside ? room - aside : 1);
    }
    if (!plan_is_idle(&state->next) && plan_advance(&state->next, &state->past, accesses * PLAN_STEPS))
        state->refreshed = 0;
}

static void accessed(pagert_core *core, const pagert_pin *pin)
{
    lookahead *state = state_of(core);
    shadow_expect(core, pin);
    refresh(core);
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        history_access(&state->past, a->region.first_page, a->first_page - a->region.first_page,
                       a->page_count, a->mode, k + 1 == pin->access_count);
    }
    go_on_planning(core, pin->access_count);
}

static void reserved(pagert_core *core, uint32_t first_page, uint32_t page_count)
{
    history_reserve(&state_of(core)->past, first_page, page_count);
}

static void released(pagert_core *core, uint32_t first_page)
{
    history_release(&state_of(core)->past, first_page);
}

/* Pages that an event brings to the device. */
static uint32_t pages_of(const event *e)
{
    return is_access(e) ? e->count : 0;
}

/* Follow the cursor with the window of events that prefetch looks at. */
static void follow_cursor(lookahead *state)
{
    history *past = &state->past;
    if (state->ahead_epoch != past->epoch || state->ahead <= past->cursor) {
        state->behind = past->cursor;
        state->ahead = past->cursor + 1;
        state->ahead_pages = state->ahead_fetched = 0;
        state->ahead_epoch = past->epoch;
    }
    while (state->behind < past->cursor) {
        const event *e = history_event(past, ++state->behind);
        state->ahead_pages -= pages_of(e);
        state->ahead_fetched -= e->ahead;
    }
}

/* The next range to fetch: `first_page` and `page_count`, wanted at `time`. False: none is known, or it lies
 * so far ahead that its frames serve better where they are: what is fetched early shrinks the cache, and
 * with it what the furthest-use rule can save. */
static bool upcoming(pagert_core *core, uint32_t *first_page, uint32_t *page_count, uint32_t *time)
{
    lookahead *state = state_of(core);
    history *past = &state->past;
    state->fetches_ahead = true;
    if (!history_is_sure(past))
        return false;
    follow_cursor(state);
    uint64_t window = state->next.written ? core->config.frame_count[PAGERT_DEVICE] / SEEN_SHARE
                                          : ahead_pages_max(core) - 1;
    for (; state->ahead < past->now && state->ahead_pages <= window && state->ahead_fetched < ahead_pages_max(core);
         state->ahead++) {
        event *e = &past->events[state->ahead & past->event_mask];
        e->ahead = 0;
        state->ahead_pages += pages_of(e);
        if ((e->kind != EVENT_READ && e->kind != EVENT_UPDATE) || e->role == NONE)
            continue;
        uint32_t first = past->roles[e->role].first_page;
        if (first == NONE) /* not allocated yet: it will be zero pages */
            continue;
        const page *head = &core->pages[first];
        if (e->offset >= head->page_count || e->count > head->page_count - e->offset)
            continue;
        state->ahead_missing = 0;
        for (uint32_t i = 0; i < e->count; i++) {
            const page *p = &core->pages[first + e->offset + i];
            state->ahead_missing += p->copy[PAGERT_DEVICE] == COPY_NONE && !has(p, PAGE_ZERO);
        }
        if (state->ahead_missing > 0) {
            *first_page = first + e->offset;
            *page_count = e->count;
            *time = past->now - 1 + (state->ahead - past->cursor);
            state->ahead_pages -= pages_of(e); /* it is looked at again, until it is on its way */
            return shadow_affords_fetch(core, *first_page, *page_count);
        }
    }
    return false;
}

/* What upcoming() said last is on its way: once is enough, whatever happens to it. */
static void fetched(pagert_core *core)
{
    lookahead *state = state_of(core);
    event *e = &state->past.events[state->ahead++ & state->past.event_mask];
    e->ahead = (uint8_t)(state->ahead_missing < UINT8_MAX ? state->ahead_missing : UINT8_MAX);
    state->ahead_pages += pages_of(e);
    state->ahead_fetched += e->ahead;
}

const pagert_policy policy_lookahead = {
    .name = "lookahead",
    .state_bytes = state_bytes,
    .init = init,
    .insert = insert,
    .remove = remove_page,
    .victim = victim,
    .evictable_count = evictable_count,
    .reserved = reserved,
    .released = released,
    .accessed = accessed,
    .making_room = shadow_making_room,
    .begun = shadow_begun,
    .placed = shadow_placed,
    .let_go = shadow_let_go,
    .changed = changed,
    .written = shadow_written,
    .not_overwritten = shadow_not_overwritten,
    .sent_away = shadow_sent_away,
    .copy_lost = shadow_copy_lost,
    .flushed = shadow_flushed,
    .transferred = shadow_transferred,
    .upcoming = upcoming,
    .fetched = fetched,
    .leaver = leaver,
    .writable = writable,
    .host_insert = host_insert,
    .host_remove = host_remove,
    .host_victim = host_victim,
    .check = shadow_check,
};

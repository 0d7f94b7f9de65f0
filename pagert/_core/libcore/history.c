/* SPDX-License-Identifier: Apache-2.0
 *
 * history: see history.h. Owns the memory it is given; every step is O(1), except that a next use is found
 * along the uses of one region in the last two periods, of which it looks at no more than STEPS_MAX.
 */
#include "history.h"

enum {
    EVENTS = 1 << 18,  /* two steps of 130,000 operators' operands */
    RECALLS = 1 << 19,
    REGIONS = 1 << 18, /* half of them used at most */
    ROLES = 1 << 18,
    CONTEXT = 4,       /* events that say where we are */
    WINDOW = 8,        /* events that may be left out before the cursor counts as lost */
    MISSES_MAX = 64,   /* events that may be put in between, likewise */
    STEPS_MAX = 256,
};

uint64_t history_bytes(void)
{
    return EVENTS * sizeof(event) + RECALLS * sizeof(uint32_t) + REGIONS * sizeof(uint32_t) +
           ROLES * sizeof(role);
}

/* The memory is zeroed; what is NONE at the start is written as an offset by one or never read before. */
void history_init(history *past, unsigned char *memory)
{
    *past = (history){.event_mask = EVENTS - 1,
                      .recall_mask = RECALLS - 1,
                      .region_mask = REGIONS - 1,
                      .role_count = ROLES,
                      .cursor = NONE};
    past->events = (event *)(void *)memory;
    memory += EVENTS * sizeof(event);
    past->roles = (role *)(void *)memory;
    memory += ROLES * sizeof(role);
    past->recall = (uint32_t *)(void *)memory;
    memory += RECALLS * sizeof(uint32_t);
    past->regions = (uint32_t *)(void *)memory;
}

static uint32_t mix(uint32_t hash, uint32_t value)
{
    hash ^= value;
    hash *= 0x9e3779b1u;
    return hash ^ (hash >> 15);
}

/* Roles of regions: linear probing, with the gap closed at removal. An entry is 1 + role. */

static uint32_t home_of(const history *past, uint32_t first_page)
{
    return mix(0, first_page) & past->region_mask;
}

static uint32_t find_entry(const history *past, uint32_t first_page)
{
    uint32_t at = home_of(past, first_page);
    while (past->regions[at] != 0 && past->roles[past->regions[at] - 1].first_page != first_page)
        at = (at + 1) & past->region_mask;
    return at;
}

static uint32_t role_of(const history *past, uint32_t first_page)
{
    return past->regions[find_entry(past, first_page)] - 1; /* 0 - 1 is NONE */
}

static void remove_entry(history *past, uint32_t at)
{
    past->regions[at] = 0;
    past->region_used--;
    for (uint32_t next = (at + 1) & past->region_mask; past->regions[next] != 0;
         next = (next + 1) & past->region_mask) {
        uint32_t home = home_of(past, past->roles[past->regions[next] - 1].first_page);
        if (((next - home) & past->region_mask) >= ((next - at) & past->region_mask)) {
            past->regions[at] = past->regions[next];
            past->regions[next] = 0;
            at = next;
        }
    }
}

/* A role that no region has and that no event of the ring names any more; NONE if none is found soon. */
static uint32_t fresh_role(history *past)
{
    for (uint32_t tries = 0; tries < 64; tries++) {
        uint32_t candidate = past->next_role;
        past->next_role = (past->next_role + 1) % past->role_count;
        role *r = &past->roles[candidate];
        bool used_before = candidate < past->roles_used;
        if (!used_before || (r->first_page == NONE && !history_keeps(past, r->last_event))) {
            if (!used_before)
                past->roles_used = candidate + 1;
            *r = (role){NONE, NONE, 0};
            return candidate;
        }
    }
    return NONE;
}

static bool equal(const event *a, const event *b)
{
    if (a->kind != b->kind || a->count != b->count || a->offset != b->offset)
        return false;
    return a->kind == EVENT_RESERVE || a->role == b->role || (a->age == b->age && a->age != AGE_OLD);
}

static uint32_t hash_of(const event *e)
{
    uint32_t hash = mix(0, e->kind + 1u);
    hash = mix(hash, e->offset);
    hash = mix(hash, e->count);
    return e->kind == EVENT_RESERVE ? hash : mix(hash, e->age != AGE_OLD ? e->age : AGE_OLD + e->role);
}

/* Note where the last CONTEXT events (the newest is `now - 1`) occurred: here. What was noted before, or NONE. */
static uint32_t note_context(history *past)
{
    if (past->now < CONTEXT)
        return NONE;
    uint32_t newest = past->now - 1, hash = 0;
    for (uint32_t k = 0; k < CONTEXT; k++)
        hash = mix(hash, history_event(past, newest - k)->hash);
    uint32_t *entry = &past->recall[hash & past->recall_mask];
    uint32_t recalled = *entry - 1;
    *entry = newest + 1;
    return recalled;
}

/* Whether the last CONTEXT events are those that end at `recalled`. */
static bool is_recalled(const history *past, uint32_t recalled)
{
    uint32_t newest = past->now - 1;
    if (recalled == NONE || recalled < CONTEXT || recalled == newest || !history_keeps(past, recalled - CONTEXT))
        return false;
    for (uint32_t k = 0; k < CONTEXT; k++)
        if (!equal(history_event(past, recalled - k), history_event(past, newest - k)))
            return false;
    return true;
}

/* How far ahead of the cursor the prediction has this event, at most WINDOW; 0: not there. */
static uint32_t find_ahead(const history *past, const event *e)
{
    uint32_t reach = history_reach(past);
    for (uint32_t k = 1; k <= WINDOW && k <= reach; k++)
        if (equal(history_event(past, past->cursor + k), e))
            return k;
    return 0;
}

/* The region of the newest event plays this role from now on, if nobody else does. */
static void take_over(history *past, event *newest, uint32_t name)
{
    role *now = &past->roles[newest->role], *then = &past->roles[name];
    if (then->first_page != NONE || now->first_page == NONE)
        return;
    past->regions[find_entry(past, now->first_page)] = name + 1;
    *then = (role){now->first_page, past->now - 1, now->reserved_at};
    now->first_page = NONE;
    now->last_event = newest->previous;
    newest->previous = history_event(past, past->cursor)->role == name ? past->cursor : NONE;
    newest->role = name;
    newest->hash = hash_of(newest);
}

/* The newest event repeats the one at the cursor: what was planned for that one holds for it. */
static void match(history *past)
{
    event *newest = &past->events[(past->now - 1) & past->event_mask];
    const event *then = history_event(past, past->cursor);
    newest->match = past->cursor;
    newest->keep = then->keep;
    if (newest->kind != EVENT_RESERVE && newest->role != then->role && newest->role != NONE && then->role != NONE)
        take_over(past, newest, then->role);
}

static uint8_t age_of(const history *past, uint32_t name)
{
    uint32_t age = name != NONE ? past->now - past->roles[name].reserved_at : AGE_OLD;
    return age < AGE_OLD ? (uint8_t)age : AGE_OLD;
}

static void jump(history *past, uint32_t cursor, uint32_t run)
{
    past->cursor = cursor;
    past->run = run;
    past->misses = 0;
    past->epoch++;
    if (cursor != NONE)
        match(past);
}

/* Regions are released when their last user is gone, a little earlier or later than the last time: that is no
 * other sequence. */
static bool only_releases(const history *past, uint32_t skipped)
{
    for (uint32_t k = 1; k < skipped; k++)
        if (history_event(past, past->cursor + k)->kind != EVENT_RELEASE)
            return false;
    return true;
}

/* The newest event is in the ring at now - 1; `reach` and the cursor are as before it. */
static void follow(history *past, const event *e)
{
    uint32_t newest = past->now - 1;
    uint32_t recalled = note_context(past);
    if (past->cursor != NONE && !history_keeps(past, past->cursor))
        past->cursor = NONE;
    if (past->cursor != NONE && past->cursor + 1 < newest &&
        equal(history_event(past, past->cursor + 1), e)) {
        past->cursor++;
        past->run++;
        past->misses = 0;
        match(past);
        return;
    }
    uint32_t skipped = past->cursor != NONE ? find_ahead(past, e) : 0;
    if (skipped > 0 && past->cursor + skipped < newest) {
        bool in_order = only_releases(past, skipped);
        past->cursor += skipped;
        past->run = in_order ? past->run + 1 : past->run / 2;
        past->misses = 0;
        match(past);
    } else if (is_recalled(past, recalled)) {
        jump(past, recalled, CONTEXT);
    } else if (past->cursor != NONE && ++past->misses > MISSES_MAX) {
        jump(past, NONE, 0);
    } else if (e->kind != EVENT_RELEASE) {
        past->run = 0;
    }
}

static void append(history *past, event e)
{
    uint32_t index = past->now++;
    e.previous = e.match = e.keep = NONE;
    if (e.role != NONE) {
        e.previous = past->roles[e.role].last_event;
        past->roles[e.role].last_event = index;
    }
    e.hash = hash_of(&e);
    past->events[index & past->event_mask] = e;
    follow(past, &e);
    past->unplanned += is_access(&e) && history_event(past, index)->keep == NONE;
}

void history_access(history *past, uint32_t first_page, uint32_t offset, uint32_t count, uint32_t mode,
                    bool last)
{
    uint32_t name = role_of(past, first_page);
    append(past, (event){.role = name,
                         .age = age_of(past, name),
                         .offset = offset,
                         .count = count,
                         .kind = (uint8_t)mode,
                         .last = last});
}

void history_reserve(history *past, uint32_t first_page, uint32_t count)
{
    event e = {.role = NONE, .count = count, .kind = EVENT_RESERVE};
    uint32_t ahead = past->cursor != NONE ? find_ahead(past, &e) : 0;
    if (ahead > 0) {
        uint32_t then = history_event(past, past->cursor + ahead)->role;
        if (then != NONE && past->roles[then].first_page == NONE)
            e.role = then;
    }
    if (e.role == NONE && past->region_used < past->region_mask / 2)
        e.role = fresh_role(past);
    if (e.role != NONE) {
        past->roles[e.role].first_page = first_page;
        past->roles[e.role].reserved_at = past->now;
        uint32_t at = find_entry(past, first_page);
        PAGERT_ASSERT(past->regions[at] == 0);
        past->regions[at] = e.role + 1;
        past->region_used++;
    }
    append(past, e);
}

void history_release(history *past, uint32_t first_page)
{
    uint32_t at = find_entry(past, first_page);
    uint32_t name = past->regions[at] - 1;
    if (name != NONE) {
        remove_entry(past, at);
        past->roles[name].first_page = NONE;
    }
    append(past, (event){.role = name, .kind = EVENT_RELEASE, .age = age_of(past, name)});
}

/* Whether the event is a use of the page; narrows [from, to) to pages of which the same is true. */
static bool concerns(const event *e, uint32_t offset, uint32_t *from, uint32_t *to)
{
    if (e->kind == EVENT_RELEASE || e->kind == EVENT_RESERVE)
        return e->kind == EVENT_RELEASE;
    uint32_t end = e->offset + e->count;
    bool inside = offset >= e->offset && offset < end;
    if (offset >= end)
        *from = end > *from ? end : *from;
    else if (inside)
        *from = e->offset > *from ? e->offset : *from;
    if (offset < e->offset)
        *to = e->offset < *to ? e->offset : *to;
    else if (inside)
        *to = end < *to ? end : *to;
    return inside;
}

bool history_next_use(const history *past, uint32_t first_page, uint32_t offset, use *next)
{
    uint32_t name = role_of(past, first_page);
    next->event = NULL;
    next->from = 0;
    next->to = NONE;
    if (name == NONE || past->cursor == NONE)
        return false;
    /* What happened in (cursor, now) will happen again from now on; what happened in the same stretch up to
     * the cursor comes one period later. The earliest of the first, else of the second, is the next use. */
    uint32_t period = history_reach(past), newest = past->now - 1;
    uint32_t soon = NONE, later = NONE, index = past->roles[name].last_event;
    for (uint32_t step = 0; step < STEPS_MAX && index != NONE && history_keeps(past, index); step++) {
        const event *e = history_event(past, index);
        if (index + period <= past->cursor || (index <= past->cursor && soon != NONE))
            break;
        if (concerns(e, offset, &next->from, &next->to)) {
            if (index > past->cursor)
                soon = index;
            else
                later = index;
        }
        index = e->previous;
    }
    uint32_t found = soon != NONE ? soon : later;
    if (found == NONE)
        return false;
    next->event = history_event(past, found);
    next->time = newest + (found - past->cursor) + (soon == NONE ? period : 0);
    return true;
}

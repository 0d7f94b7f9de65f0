/* SPDX-License-Identifier: Apache-2.0
 *
 * history: what was accessed, and what will be.
 *
 * A training step repeats. The history keeps the last events (accesses, allocations, releases) in a ring and
 * a cursor into its own past: the event where the same thing happened before. What followed then is the
 * prediction of what follows now. The cursor is found again by the last few events, wherever they occurred
 * last, as in dictionary compression (Ziv, Lempel 1977), so that several sequences (train, evaluate) are
 * known at once and none has to be announced.
 *
 * Regions are known by roles. A region that is allocated where the prediction has an allocation of the same
 * size takes over the role of the one allocated then: gradients and activations are new regions in each
 * step, and their roles are not. Where nothing is predicted yet, a young region is recognised by its age, and
 * takes over the role of the one that had the same age then.
 */
#ifndef PAGERT_HISTORY_H
#define PAGERT_HISTORY_H

#include "internal.h"

enum { EVENT_READ, EVENT_UPDATE, EVENT_OVERWRITE, EVENT_RESERVE, EVENT_RELEASE };

typedef struct event {
    uint32_t role;
    uint32_t offset, count; /* pages within the region; of EVENT_RESERVE: 0 and its size */
    uint32_t previous;      /* the event before it with the same role, or NONE */
    uint32_t match;         /* the event of the past that it repeats, or NONE */
    uint32_t hash;          /* of what makes it equal to another */
    uint32_t keep;          /* pages to keep until it happens, as plan.c found, or NONE: not planned */
    uint8_t kind;
    uint8_t age; /* events since its region was allocated, or AGE_OLD */
    uint8_t ahead; /* pages, at most 255, that were fetched ahead for what repeats it */
    bool last;   /* the last access of its pin */
} event;

#define AGE_OLD 64

typedef struct role {
    uint32_t first_page; /* the region that has it now, or NONE */
    uint32_t last_event; /* or NONE */
    uint32_t reserved_at;
} role;

typedef struct history {
    event *events;     /* ring */
    uint32_t *recall;  /* context hash -> the last event of that context */
    uint32_t *regions; /* hash of first_page -> 1 + role, linear probing */
    role *roles;
    uint32_t event_mask, recall_mask, region_mask, role_count;
    uint32_t now;      /* events so far; event i is in the ring while now - i <= capacity */
    uint32_t cursor;   /* the event of the past that matches the last one, or NONE */
    uint32_t run;      /* matches in a row */
    uint32_t misses;   /* mismatches since the last match */
    uint32_t epoch;    /* counts the jumps of the cursor: predictions made before one are stale */
    uint32_t unplanned; /* accesses without a plan since this was last set to 0 */
    uint32_t next_role, roles_used, region_used;
} history;

/* A use of a page to come. */
typedef struct use {
    uint32_t time;      /* in events from the start of the history, like `now` */
    const event *event; /* what happened the last time: EVENT_READ ..., EVENT_RELEASE */
    uint32_t from, to;  /* pages of the region whose next use this is, too: from <= page < to */
} use;

uint64_t history_bytes(void);
void history_init(history *past, unsigned char *memory);
void history_access(history *past, uint32_t first_page, uint32_t offset, uint32_t count, uint32_t mode,
                    bool last);
void history_reserve(history *past, uint32_t first_page, uint32_t count);
void history_release(history *past, uint32_t first_page);

/* The next predicted use of a page of the region that begins at `first_page`. False: none is known. */
bool history_next_use(const history *past, uint32_t first_page, uint32_t offset, use *next);

/* Whether the last events went as predicted. */
static inline bool history_is_sure(const history *past) { return past->cursor != NONE && past->run >= 8; }

static inline const event *history_event(const history *past, uint32_t index)
{
    return &past->events[index & past->event_mask];
}

/* Whether the event is still in the ring. */
static inline bool history_keeps(const history *past, uint32_t index)
{
    return index < past->now && past->now - index <= past->event_mask;
}

static inline bool is_access(const event *e) { return e->kind <= EVENT_OVERWRITE; }

/* Events that the prediction reaches ahead: history_event(past, past->cursor + k) happens at now + k - 1
 * for 1 <= k <= this. */
static inline uint32_t history_reach(const history *past)
{
    return past->cursor == NONE ? 0 : past->now - 1 - past->cursor;
}

#endif

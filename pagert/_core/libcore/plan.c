/* SPDX-License-Identifier: Apache-2.0
 *
 * plan: see plan.h. Stages: find the gaps, link those of the same bytes, then rounds of three (weigh each gap
 * with its pages' other gaps, choose, set prices), then write the result into the history. Each is a loop
 * that can stop anywhere.
 */
#include "plan.h"

enum {
    EVENTS_MAX = 1 << 17, /* of a period: half of the history's ring */
    CHAIN_MAX = 16,       /* events of a region that are looked at for the one before */
    ROUNDS = 200,
    ROUNDS_SKIPPED = 50, /* while prices find their order of magnitude */
    WHOLE_SHARE = 128, /* windows of at most this part of the room stay or go as a whole */
};
#define RATE 1.0f      /* of the first round's step, for a load of twice the room */
#define RATE_FALLS 0.02f
#define PRICE_FIRST 5.0f /* of a frame for the whole period, in transfers */
#define PRICE_LEAST 1e-9f

uint64_t plan_bytes(void)
{
    return EVENTS_MAX * (sizeof(gap) + 4 * sizeof(uint32_t) + sizeof(float) + 2 * sizeof(double)) +
           2 * sizeof(double);
}

void plan_init(plan *p, unsigned char *memory)
{
    *p = (plan){.stage = PLAN_IDLE, .written = true};
    p->paid = (double *)(void *)memory;
    p->saved = p->paid + EVENTS_MAX + 2;
    p->gaps = (gap *)(void *)(p->saved + EVENTS_MAX);
    p->operator_of = (uint32_t *)(void *)(p->gaps + EVENTS_MAX);
    p->gap_of = p->operator_of + EVENTS_MAX;
    p->needed = p->gap_of + EVENTS_MAX;
    p->change = (int32_t *)(void *)(p->needed + EVENTS_MAX);
    p->price = (float *)(void *)(p->change + EVENTS_MAX);
}

bool plan_is_due(const plan *p, const history *past)
{
    uint32_t period = history_reach(past);
    return plan_is_idle(p) && period > 0 && period < EVENTS_MAX && history_is_sure(past) &&
           past->run > period / 4 && past->unplanned > (p->written ? period / 4 : period);
}

void plan_begin(plan *p, const history *past, uint32_t room)
{
    p->first = past->cursor + 1;
    p->event_count = history_reach(past);
    p->operator_count = p->gap_count = p->at = p->round = 0;
    p->needed[0] = 0;
    p->written = false;
    for (uint32_t kind = 0; kind < RANKS * KINDS * KINDS; kind++)
        p->owed[kind] = 0;
    p->rank = 0;
    p->room = room;
    p->stage = PLAN_FIND;
}

static bool is_write(const event *e) { return e->kind == EVENT_UPDATE || e->kind == EVENT_OVERWRITE; }

static uint32_t overlap(const event *a, const event *b)
{
    uint32_t from = a->offset > b->offset ? a->offset : b->offset;
    uint32_t end_a = a->offset + a->count, end_b = b->offset + b->count;
    uint32_t to = end_a < end_b ? end_a : end_b;
    return to > from ? to - from : 0;
}

/* The use of the event's pages before it, going back from `index`; NONE where they were allocated since. */
static uint32_t use_before(const plan *p, const history *past, const event *e, uint32_t index)
{
    for (uint32_t step = 0; step < CHAIN_MAX && index != NONE && index >= p->first; step++) {
        const event *before = history_event(past, index);
        if (index < p->first + p->event_count) {
            if (!is_access(before))
                return NONE;
            if (e->kind == EVENT_RELEASE || overlap(before, e) > 0)
                return index;
        }
        index = before->previous;
    }
    return NONE;
}

/* The gap that the event ends. Where its pages' use before lies in the turn before, that is taken for the last
 * one of this turn. `start` is an event for now. */
static void find_gap(plan *p, const history *past, uint32_t number)
{
    const event *e = history_event(past, p->first + number);
    bool wraps = e->previous == NONE || e->previous < p->first;
    uint32_t before = use_before(p, past, e, wraps ? past->roles[e->role].last_event : e->previous);
    if (before == NONE)
        return;
    const event *start = history_event(past, before);
    p->gap_of[number] = p->gap_count;
    p->gaps[p->gap_count++] = (gap){.event = number,
                                    .start = before - p->first,
                                    .end = p->operator_of[number],
                                    .pages = e->kind == EVENT_RELEASE ? start->count : overlap(start, e),
                                    .root = NONE,
                                    .wraps = wraps,
                                    .fetched = e->kind == EVENT_READ || e->kind == EVENT_UPDATE};
}

static void find(plan *p, const history *past)
{
    const event *e = history_event(past, p->first + p->at);
    p->operator_of[p->at] = p->operator_count;
    p->gap_of[p->at] = NONE;
    if (e->kind != EVENT_RESERVE && e->role != NONE)
        find_gap(p, past, p->at);
    if (is_access(e)) {
        p->written |= is_write(e);
        p->needed[p->operator_count] += e->count;
        if (e->last)
            p->needed[++p->operator_count] = 0;
    }
}

/* Gaps of the same bytes: from a write to the next. Twice around, for those that began in the turn before. */
static void link_gap(plan *p, const history *past)
{
    uint32_t number = p->at % p->gap_count;
    gap *g = &p->gaps[number];
    uint32_t before = p->gap_of[g->start];
    if (is_write(history_event(past, p->first + g->start)))
        g->root = number;
    else if (before != NONE)
        g->root = p->gaps[before].root;
    if (p->at >= p->gap_count) { /* from here on, `start` is an operator */
        g->start = p->operator_of[g->start] + 1;
        if (!g->wraps && g->start >= g->end)
            g->pages = 0; /* it spans nothing */
    }
}

/* What a frame costs over the gap. */
static double cost_of(const plan *p, const gap *g)
{
    return (g->wraps ? p->paid[p->operator_count] : 0) + p->paid[g->end] - p->paid[g->start];
}

/* How much more that is than what leaving costs in this gap alone: what leaving would save. */
static double saved_by_leaving(const plan *p, const gap *g)
{
    return cost_of(p, g) - g->fetched;
}

static void weigh(plan *p)
{
    const gap *g = &p->gaps[p->at];
    double saved = g->root != NONE ? saved_by_leaving(p, g) : 0;
    if (saved > 0)
        p->saved[g->root] += saved;
}

static void choose(plan *p)
{
    gap *g = &p->gaps[p->at];
    if (saved_by_leaving(p, g) > 0 && (g->root == NONE || p->saved[g->root] > 1))
        return;
    g->kept = (uint16_t)(g->kept + (p->round > ROUNDS_SKIPPED));
    p->change[g->start] += (int32_t)g->pages;
    p->change[g->end] -= (int32_t)g->pages;
    if (g->wraps)
        p->change[0] += (int32_t)g->pages;
}

/* The price of a frame at one operator, for the next round; and what else the next round begins with. */
static void set_price(plan *p)
{
    uint32_t at = p->at;
    if (at == 0) {
        p->load = 0;
        p->paid[0] = 0;
    }
    if (at < p->gap_count)
        p->saved[at] = 0;
    if (at >= p->operator_count)
        return;
    if (p->round == 0) {
        p->price[at] = PRICE_FIRST / (float)p->operator_count;
    } else {
        p->load += p->change[at];
        float excess = ((float)p->load + (float)p->needed[at] - (float)p->room) / (float)p->room;
        float step = excess * RATE / (1 + RATE_FALLS * (float)p->round);
        step = step > 1 ? 1 : step < -1 ? -1 : step;
        float price = p->price[at] * (1 + step + step * step / 2); /* as good as exp() */
        p->price[at] = price > PRICE_LEAST ? price : PRICE_LEAST;
    }
    p->change[at] = 0;
    p->paid[at + 1] = p->paid[at] + (double)p->price[at];
}

/* Gaps of one kind lie alike in the period: those of the first operand that was read and is updated next, say. */
static uint32_t kind_of_gap(const plan *p, const history *past, const event *e)
{
    bool known = e->previous != NONE && history_keeps(past, e->previous);
    uint32_t start = known ? history_event(past, e->previous)->kind : EVENT_READ;
    uint32_t end = e->kind == EVENT_RELEASE ? KINDS - 1 : e->kind;
    uint32_t rank = p->rank < RANKS ? p->rank : RANKS - 1;
    return (rank * KINDS + (start < KINDS ? start : EVENT_READ)) * KINDS + end;
}

/* A window of which a part stays has to move, or its neighbours do, when the rest comes back. So small ones stay or go
 * as a whole, and what that gives or takes the next gaps of their kind make up for. */
static uint32_t in_whole_windows(plan *p, uint32_t kind, uint32_t keep, uint32_t pages)
{
    if (keep == 0 || keep >= pages || pages > p->room / WHOLE_SHARE)
        return keep;
    p->owed[kind] += (int32_t)keep;
    if (2 * p->owed[kind] < (int32_t)pages)
        return 0;
    p->owed[kind] -= (int32_t)pages;
    return KEEP_ALL;
}

static uint32_t pages_to_keep(plan *p, const history *past, uint32_t number, const event *e)
{
    if (p->gap_of[number] == NONE)
        return KEEP_ALL;
    const gap *g = &p->gaps[p->gap_of[number]];
    uint64_t rounds = ROUNDS - ROUNDS_SKIPPED, pages = e->kind == EVENT_RELEASE ? g->pages : e->count;
    if (g->kept == rounds)
        return KEEP_ALL;
    return in_whole_windows(p, kind_of_gap(p, past, e), (uint32_t)((2 * g->kept * pages + rounds) / (2 * rounds)),
                            (uint32_t)pages);
}

/* Of the period; then of the events since then that repeat it. */
static void publish(plan *p, history *past)
{
    event *e = &past->events[(p->first + p->at) & past->event_mask];
    if (p->at < p->event_count)
        e->keep = pages_to_keep(p, past, p->at, e);
    else if (e->match != NONE && e->match >= p->first)
        e->keep = history_event(past, e->match)->keep;
    p->rank = is_access(e) && !e->last ? p->rank + 1 : 0;
}

/* One step of the stage that goes on; how many it has. */
static uint32_t step(plan *p, history *past)
{
    switch (p->stage) {
    case PLAN_FIND:
        find(p, past);
        return p->event_count;
    case PLAN_LINK:
        link_gap(p, past);
        return 2 * p->gap_count;
    case PLAN_PRICE:
        set_price(p);
        return p->operator_count > p->gap_count ? p->operator_count : p->gap_count;
    case PLAN_WEIGH:
        weigh(p);
        return p->gap_count;
    case PLAN_CHOOSE:
        choose(p);
        return p->gap_count;
    default:
        publish(p, past);
        return past->now - p->first;
    }
}

static uint32_t next_stage(plan *p)
{
    switch (p->stage) {
    case PLAN_FIND:
        return !p->written ? PLAN_IDLE : p->gap_count > 0 ? PLAN_LINK : PLAN_PUBLISH;
    case PLAN_LINK:
        return PLAN_PRICE;
    case PLAN_PRICE:
        return p->round++ < ROUNDS ? PLAN_WEIGH : PLAN_PUBLISH;
    case PLAN_WEIGH:
        return PLAN_CHOOSE;
    case PLAN_CHOOSE:
        return PLAN_PRICE;
    default:
        return PLAN_IDLE;
    }
}

bool plan_advance(plan *p, history *past, uint32_t steps)
{
    if (!history_keeps(past, p->first)) /* too long ago: what it would say is forgotten */
        p->stage = PLAN_IDLE;
    for (; steps > 0 && p->stage != PLAN_IDLE; steps--) {
        uint32_t count = step(p, past);
        if (++p->at < count)
            continue;
        p->at = 0;
        p->stage = next_stage(p);
        if (p->stage == PLAN_IDLE)
            return true;
    }
    return false;
}

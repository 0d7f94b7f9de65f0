/* SPDX-License-Identifier: Apache-2.0
 *
 * place: give a span of pages a window, one run of device frames.
 *
 * The policy alone says who must go; then a run is chosen where the fewest pages have to move, and whoever
 * is in the way and stays moves to a free frame elsewhere. Moves never wait for each other in a circle: a
 * page in the way goes to a frame that is free or being vacated, never to one that another mover leaves.
 * What cannot be had that way is left to repack.c.
 */
#include "internal.h"

/* What stands in the way of giving a frame to another page. */
int frame_class(const pagert_core *core, uint32_t frame)
{
    const device_frame *f = &core->frames[frame];
    if (f->page == NONE)
        return f->heir == NONE ? FRAME_FREE
               : core->pages[f->heir].holds > 0 ? FRAME_HELD : FRAME_BUSY;
    const page *p = &core->pages[f->page];
    if (p->holds > (has(p, PAGE_WANTED) ? 1 : 0))
        return FRAME_HELD;
    if (f->heir != NONE)
        return core->pages[f->heir].holds > 0 ? FRAME_HELD : FRAME_BUSY;
    if (has(p, PAGE_LEAVING))
        return FRAME_VACATING;
    if (p->copy[PAGERT_DEVICE] != COPY_VALID || p->queue != QUEUE_NONE || has(p, PAGE_MOVING | PAGE_DYING))
        return FRAME_BUSY;
    return FRAME_MOVABLE;
}

/* Nothing in flight, queued or promised: every frame is free, or has a page at rest. */
bool is_quiet(const pagert_core *core)
{
    if (core->in_flight > 0 || core->vacating > 0 || core->moving > 0)
        return false;
    for (uint32_t queue = 0; queue < QUEUE_COUNT; queue++)
        if (core->queues[queue].count > 0)
            return false;
    return true;
}

static uint64_t available(const pagert_core *core)
{
    return frame_set_free_count(&core->sets[PAGERT_DEVICE]) + core->vacating;
}

/* Evict one page. Without a host tier a dirty victim needs a flash frame now. `optional`: see victim_need. */
static int evict_one(pagert_core *core, pagert_pin *pin, bool optional)
{
    victim_need need = {.time = pin->needed_at, .optional = optional};
    uint32_t index = core->policy->victim(core, need);
    if (index == NONE)
        return is_quiet(core) ? PLACE_BLOCKED : PLACE_BUSY;
    page *p = &core->pages[index];
    if (!is_clean(p) && !configured(core, PAGERT_HOST) && p->copy[PAGERT_FLASH] == COPY_NONE) {
        uint32_t frame = lower_take_flash(core);
        if (frame == NONE) {
            pin->failure = (pagert_failure){index, PAGERT_DEVICE_TO_FLASH, PAGERT_E_FULL};
            need.clean_only = true;
            index = core->policy->victim(core, need);
            if (index == NONE)
                return PAGERT_E_FULL;
        } else {
            p->frame[PAGERT_FLASH] = frame;
            p->copy[PAGERT_FLASH] = COPY_INCOMING;
        }
    }
    if (!core->flushing)
        clear_flag(p, PAGE_CLEANING); /* it was written ahead: nobody has asked for that by name */
    page_start_leaving(core, index);
    return PLACE_DONE;
}

/* Evict until so many frames are free or being vacated. */
int place_make_room(pagert_core *core, pagert_pin *pin, uint64_t frames_needed)
{
    TELL(core, making_room, core, pin);
    while (available(core) < frames_needed) {
        int outcome = evict_one(core, pin, false);
        if (outcome != PLACE_DONE)
            return outcome;
    }
    return PLACE_DONE;
}

typedef struct span {
    uint32_t first, count;
} span;

static bool in_span(span s, uint32_t index) { return index - s.first < s.count; }

typedef struct run_cost {
    uint64_t moves;     /* pages that must move, in the way or of the span itself */
    uint32_t in_way;    /* of these, other pages in the way */
    uint32_t available; /* frames of the run that are free or being vacated */
    bool usable, busy;  /* busy: not usable now, but perhaps after transfers in flight */
} run_cost;

/* The page has this frame already, or the promise of it, and will stay. */
static bool in_place(const pagert_core *core, uint32_t index, uint32_t frame)
{
    const page *p = &core->pages[index];
    return p->copy[PAGERT_DEVICE] != COPY_NONE && p->frame[PAGERT_DEVICE] == frame &&
           !has(p, PAGE_LEAVING | PAGE_MOVING);
}

/* What it takes to put the span at `base`. */
static run_cost cost_of_run(const pagert_core *core, span s, uint32_t base, uint32_t resident)
{
    run_cost cost = {.usable = true};
    uint32_t placed = 0;
    for (uint32_t i = 0; i < s.count; i++) {
        uint32_t frame = base + i, owner = core->frames[frame].page;
        if (in_place(core, s.first + i, frame)) {
            placed++;
            continue;
        }
        int class = frame_class(core, frame);
        if (class == FRAME_FREE || class == FRAME_VACATING) {
            cost.available++;
        } else if (class == FRAME_MOVABLE && !in_span(s, owner)) {
            cost.in_way++;
        } else {
            cost.usable = false;
            cost.busy |= class == FRAME_BUSY;
            return cost;
        }
    }
    cost.moves = (uint64_t)cost.in_way + resident - placed;
    return cost;
}

/* A run that nobody else may have now. */
typedef struct closed_run {
    uint32_t first, end;
} closed_run;

static bool is_closed(const pagert_core *core, span s, uint32_t frame)
{
    int class = frame_class(core, frame);
    return class == FRAME_BUSY || class == FRAME_HELD ||
           (class == FRAME_MOVABLE && in_span(s, core->frames[frame].page));
}

/* The first run of `count` within [first, end) with the most available frames, if it has more than `most`. Such a
 * run begins the range or ends with an available frame: else the one before it would be as good. */
static void fullest_run(const frame_runs *runs, uint32_t count, closed_run range, int64_t *most, uint32_t *base)
{
    if (range.end - range.first < count)
        return;
    uint32_t frame = frame_runs_next(runs, range.first), oldest = frame;
    int64_t available = 0;
    for (; frame != NONE && frame - range.first < count; frame = frame_runs_next(runs, frame + 1))
        available++;
    if (available > *most) {
        *most = available;
        *base = range.first;
    }
    for (; frame != NONE && frame < range.end; frame = frame_runs_next(runs, frame + 1)) {
        available++;
        for (; frame - oldest >= count; oldest = frame_runs_next(runs, oldest + 1))
            available--;
        if (available > *most) {
            *most = available;
            *base = frame - count + 1;
        }
    }
}

/* Put the closed run around `frame` among the others, which are in order. Not more of it than matters to few runs. */
static void insert_closed(const pagert_core *core, span s, uint32_t frame, closed_run *closed, uint32_t count)
{
    uint32_t at = count, reach = 2 * s.count;
    for (; at > 0 && closed[at - 1].first > frame; at--)
        closed[at] = closed[at - 1];
    closed_run run = {frame, frame + 1};
    uint32_t lowest = at > 0 ? closed[at - 1].end : 0;
    uint32_t highest = at < count ? closed[at + 1].first : core->config.frame_count[PAGERT_DEVICE];
    while (run.first > lowest && frame - run.first < reach && is_closed(core, s, run.first - 1))
        run.first--;
    while (run.end < highest && run.end - frame < reach && is_closed(core, s, run.end))
        run.end++;
    closed[at] = run;
}

enum { CLOSED_MAX = 32 };

/* The cheapest run: guess the one with the most available frames, and where it turns out to be closed, look again
 * beside that. NONE: too many of them are closed. */
static uint32_t guess_run(const pagert_core *core, span s)
{
    closed_run closed[CLOSED_MAX];
    for (uint32_t count = 0; count < CLOSED_MAX; count++) {
        uint32_t base = NONE, from = 0, blocked = NONE;
        int64_t most = -1;
        for (uint32_t k = 0; k < count; from = closed[k++].end)
            fullest_run(&core->runs, s.count, (closed_run){from, closed[k].first}, &most, &base);
        fullest_run(&core->runs, s.count, (closed_run){from, core->config.frame_count[PAGERT_DEVICE]}, &most,
                    &base);
        if (base == NONE)
            return NONE;
        for (uint32_t i = 0; i < s.count && blocked == NONE; i++)
            if (is_closed(core, s, base + i))
                blocked = base + i;
        if (blocked == NONE)
            return base;
        insert_closed(core, s, blocked, closed, count);
    }
    return NONE;
}

/* The same by one pass over all device frames; `busy` where a transfer in flight is in the way. */
static uint32_t scan_runs(const pagert_core *core, span s, bool *busy)
{
    uint32_t best = NONE, best_moves = UINT32_MAX, moves = 0, usable_from = 0;
    for (uint32_t frame = 0; frame < core->config.frame_count[PAGERT_DEVICE]; frame++) {
        if (is_closed(core, s, frame)) {
            *busy |= frame_class(core, frame) == FRAME_BUSY;
            usable_from = frame + 1;
            moves = 0;
            continue;
        }
        moves += frame_class(core, frame) == FRAME_MOVABLE;
        if (frame + 1 - usable_from > s.count) { /* the run slides: its first frame drops out */
            moves -= frame_class(core, frame - s.count) == FRAME_MOVABLE;
            usable_from++;
        }
        if (frame + 1 - usable_from == s.count && moves < best_moves) {
            best = usable_from;
            best_moves = moves;
        }
    }
    return best;
}

/* The cheapest run that has no page of the span in it; of equals the first. */
static uint32_t cheapest_run(pagert_core *core, span s, bool *busy)
{
    uint32_t frame = NONE;
    if (s.count == 1) {
        uint32_t cursor = core->sets[PAGERT_DEVICE].cursor;
        frame = frame_set_next_free(&core->sets[PAGERT_DEVICE], cursor);
        if (frame == NONE)
            frame = frame_set_next_free(&core->sets[PAGERT_DEVICE], 0);
        if (frame == NONE && frame_class(core, core->last_vacated) == FRAME_VACATING)
            frame = core->last_vacated; /* the victim's own, most likely */
    }
    if (frame == NONE)
        frame = frame_runs_find(&core->runs, s.count);
    if (frame == NONE)
        frame = guess_run(core, s);
#ifdef PAGERT_SLOW_CHECKS
    bool ignored = false;
    PAGERT_ASSERT(s.count == 1 || frame == NONE || frame == scan_runs(core, s, &ignored));
#endif
    return frame != NONE ? frame : scan_runs(core, s, busy);
}

/* Where the span should lie: around one of its pieces, or in the cheapest run elsewhere. */
static int choose_base(pagert_core *core, span s, uint32_t *base)
{
    uint32_t frame_count = core->config.frame_count[PAGERT_DEVICE];
    uint32_t resident = 0, forced = NONE, previous = NONE;
    uint64_t best_moves = UINT64_MAX;
    bool busy = false;
    for (uint32_t i = 0; i < s.count; i++)
        resident += core->pages[s.first + i].copy[PAGERT_DEVICE] != COPY_NONE;
    for (uint32_t i = 0; i < s.count; i++) {
        const page *p = &core->pages[s.first + i];
        if (p->copy[PAGERT_DEVICE] == COPY_NONE)
            continue;
        if (has(p, PAGE_MOVING)) /* it was in the way of another span of the pin */
            return PLACE_BUSY;
        bool held = p->holds > (has(p, PAGE_WANTED) ? 1 : 0);
        bool fixed = held || p->copy[PAGERT_DEVICE] == COPY_INCOMING || p->queue != QUEUE_NONE;
        uint32_t natural = p->frame[PAGERT_DEVICE] - i;
        bool fits = p->frame[PAGERT_DEVICE] >= i && natural + (uint64_t)s.count <= frame_count;
        if (fixed && (!fits || (forced != NONE && forced != natural)))
            return held ? PLACE_BLOCKED : PLACE_BUSY;
        if (fixed)
            forced = natural;
        if (!fits || natural == previous)
            continue;
        previous = natural;
        run_cost cost = cost_of_run(core, s, natural, resident);
        busy |= cost.busy;
        if (cost.usable && cost.moves < best_moves) {
            *base = natural;
            best_moves = cost.moves;
        }
    }
    if (forced != NONE) {
        run_cost cost = cost_of_run(core, s, forced, resident);
        *base = forced;
        return cost.usable ? PLACE_DONE : cost.busy ? PLACE_BUSY : PLACE_BLOCKED;
    }
    if (best_moves > 0) {
        uint32_t run = cheapest_run(core, s, &busy);
        if (run != NONE && cost_of_run(core, s, run, resident).moves < best_moves) {
            *base = run;
            best_moves = 0;
        }
    }
    return best_moves != UINT64_MAX ? PLACE_DONE : busy ? PLACE_BUSY : PLACE_BLOCKED;
}

/* A frame outside the run for a page that is in the way; free rather than being vacated. */
static uint32_t frame_outside(const pagert_core *core, uint32_t base, uint32_t count)
{
    const frame_set *set = &core->sets[PAGERT_DEVICE];
    uint32_t frame = frame_set_next_free(set, base + count);
    if (frame == NONE) {
        frame = frame_set_next_free(set, 0);
        if (frame != NONE && frame >= base)
            frame = NONE;
    }
    if (frame != NONE)
        return frame;
    frame = frame_runs_next(&core->runs, 0); /* none is free: one that is being vacated */
    return frame - base < count ? frame_runs_next(&core->runs, base + count) : frame;
}

/* Give the access's span a window. PLACE_BUSY: try again when a transfer has completed. PLACE_BLOCKED:
 * not possible by single moves. On these nothing was promised, but victims may have been evicted. */
int place_window(pagert_core *core, pagert_pin *pin, const pagert_access *access)
{
    span s = {access->span_first, access->span_count};
    uint32_t base = 0, resident = 0;
    for (uint32_t i = 0; i < s.count; i++)
        resident += core->pages[s.first + i].copy[PAGERT_DEVICE] != COPY_NONE;
    for (;;) {
        int outcome = choose_base(core, s, &base);
        if (outcome != PLACE_DONE)
            return outcome;
        run_cost cost = cost_of_run(core, s, base, resident);
        if (cost.in_way <= available(core) - cost.available)
            break;
        outcome = evict_one(core, pin, true); /* the span's own pieces take frames only until they have moved */
        if (outcome != PLACE_DONE)
            return outcome;
    }
    for (uint32_t i = 0; i < s.count; i++) {
        uint32_t frame = base + i, index = s.first + i, owner = core->frames[frame].page;
        if (in_place(core, index, frame))
            continue;
        if (owner != NONE && !has(&core->pages[owner], PAGE_LEAVING))
            device_start_move(core, owner, frame_outside(core, base, s.count));
        if (core->pages[index].copy[PAGERT_DEVICE] == COPY_VALID)
            device_start_move(core, index, frame);
        else
            device_assign(core, index, frame, pin_overwrites(core, pin, index));
    }
    return PLACE_DONE;
}

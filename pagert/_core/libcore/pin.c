/* SPDX-License-Identifier: Apache-2.0
 *
 * pin: hold everything that one operator needs, all at once or not at all.
 *
 * A pin is waiting (nothing held), placed (its windows are promised, its pages held) or ready (the bytes are
 * there). Until a pin that writes is ready, the old bytes are untouched on the tiers below; that it holds
 * the only copy comes true in the step that makes it ready.
 */
#include "internal.h"

/* FAILED holds its pages until it is unpinned, REFUSED never held any. */
enum { FEW = 16 };           /* accesses that are compared with each other without more ado */
enum { PIN_IDLE, PIN_WAITING, PIN_REPACKING, PIN_PLACED, PIN_READY, PIN_FAILED, PIN_REFUSED };

static void hold(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->holds < UINT16_MAX);
    if (p->holds++ == 0) {
        if (p->copy[PAGERT_DEVICE] != COPY_NONE)
            core->held_frames++;
        if (has(p, PAGE_EVICTABLE))
            page_relist(core, index);
    }
}

static void let_go(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->holds > 0);
    if (--p->holds > 0)
        return;
    if (p->copy[PAGERT_DEVICE] != COPY_NONE)
        core->held_frames--;
    clear_flag(p, PAGE_FAILED | PAGE_FULL);
    if (has(p, PAGE_OVERWRITE)) /* never became ready: the page keeps the bytes it had */
        device_forget(core, index);
    page_relist(core, index);
}

/* A pin that never became ready has let go of the page. What it meant to overwrite is fetched if another pin
 * must read it. Where all others overwrite it, too, the frame is theirs as it is. */
static void fetch_for_readers(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    if (!has(p, PAGE_OVERWRITE))
        return;
    for (const pagert_pin *pin = core->unready; pin != NULL; pin = pin->next) {
        if (pin->state == PIN_PLACED && pin_covers(pin, index) && !pin_overwrites(core, pin, index)) {
            clear_flag(p, PAGE_OVERWRITE);
            TELL(core, not_overwritten, core, index);
            page_advance(core, index);
            return;
        }
    }
}

typedef void visit(pagert_core *core, uint32_t index);

static void for_each_page(pagert_core *core, const pagert_pin *pin, visit *action)
{
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->page_count; i++)
            action(core, a->first_page + i);
    }
}

static void want(pagert_core *core, uint32_t index)
{
    hold(core, index);
    set_flag(&core->pages[index], PAGE_WANTED);
}

/* It stays where it is, or is promised to be: the pin does not move it any more. */
static void fix(pagert_core *core, uint32_t index)
{
    clear_flag(&core->pages[index], PAGE_WANTED);
}

static void unwant(pagert_core *core, uint32_t index)
{
    fix(core, index);
    let_go(core, index);
}

/* All pages of the span in one run of frames, there or on their way. */
static bool is_window(const pagert_core *core, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const page *p = &core->pages[first + i];
        if (p->copy[PAGERT_DEVICE] == COPY_NONE ||
            has(p, PAGE_LEAVING | PAGE_MOVING | PAGE_FAILED) ||
            p->frame[PAGERT_DEVICE] != core->pages[first].frame[PAGERT_DEVICE] + i)
            return false;
    }
    return true;
}

/* Whether no two accesses are of one region, so that none overlap: what lists of tensors have. */
static bool is_spread(const pagert_pin *pin)
{
    enum { ENTRIES = 1024 };
    uint32_t seen[ENTRIES] = {0}; /* 1 + first page of a region */
    if (pin->access_count > ENTRIES / 2)
        return false;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        uint32_t region = pin->accesses[k].region.first_page + 1, entry = region * 0x9e3779b1u >> 22;
        for (; seen[entry] != 0; entry = (entry + 1) % ENTRIES)
            if (seen[entry] == region)
                return false;
        seen[entry] = region;
    }
    return true;
}

/* Accesses whose pages overlap need one window: the first of them stands for all. */
static void find_spans(pagert_pin *pin)
{
    bool apart = pin->access_count > FEW && is_spread(pin);
    for (uint32_t k = 0; k < pin->access_count; k++) {
        pagert_access *a = &pin->accesses[k];
        a->span_first = a->first_page;
        a->span_count = a->page_count;
        for (uint32_t j = 0; j < k && !apart; j++) {
            pagert_access *b = &pin->accesses[j];
            if (b->span_count == 0 || b->span_first >= a->span_first + a->span_count ||
                a->span_first >= b->span_first + b->span_count)
                continue;
            uint32_t end_a = a->span_first + a->span_count, end_b = b->span_first + b->span_count;
            uint32_t end = end_a > end_b ? end_a : end_b;
            if (b->span_first < a->span_first)
                a->span_first = b->span_first;
            a->span_count = end - a->span_first;
            b->span_count = 0;
            j = UINT32_MAX; /* it grew: look at all of them again */
        }
    }
}

static void count_uses(const pagert_core *core, pagert_pin *pin)
{
    pin->hits = pin->faults = 0;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->span_count; i++) {
            if (core->pages[a->span_first + i].copy[PAGERT_DEVICE] != COPY_NONE)
                pin->hits++;
            else
                pin->faults++;
        }
    }
}

/* Pages that are on their way out stay if they can. False if one cannot be had until a transfer is done. */
static bool recall_pages(pagert_core *core, const pagert_pin *pin)
{
    bool idle = true;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->page_count; i++) {
            const page *p = &core->pages[a->first_page + i];
            if (has(p, PAGE_FAILED | PAGE_MOVING) ||
                (has(p, PAGE_LEAVING) && !page_stay(core, a->first_page + i)))
                idle = false;
        }
    }
    return idle;
}

static int place_spans(pagert_core *core, pagert_pin *pin)
{
    uint64_t missing = 0;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        bool placed = a->span_count > 0 && is_window(core, a->span_first, a->span_count);
        for (uint32_t i = 0; i < a->span_count; i++) {
            if (core->pages[a->span_first + i].copy[PAGERT_DEVICE] == COPY_NONE)
                missing++;
            if (placed)
                fix(core, a->span_first + i);
        }
    }
    int outcome = place_make_room(core, pin, missing);
    for (uint32_t k = 0; k < pin->access_count && outcome == PLACE_DONE; k++) {
        const pagert_access *a = &pin->accesses[k];
        if (a->span_count == 0 || is_window(core, a->span_first, a->span_count))
            continue;
        outcome = place_window(core, pin, a);
        for (uint32_t i = 0; i < a->span_count && outcome == PLACE_DONE; i++)
            fix(core, a->span_first + i);
    }
    return outcome;
}

/* A page that failed stays so until the pins that held it then have heard of it and let go. */
static bool has_failed_page(const pagert_core *core, const pagert_pin *pin)
{
    for (uint32_t k = 0; k < pin->access_count; k++)
        for (uint32_t i = 0; i < pin->accesses[k].page_count; i++)
            if (has(&core->pages[pin->accesses[k].first_page + i], PAGE_FAILED))
                return true;
    return false;
}

/* Room for what the pin lacks, and one frame to move things through; its own pages stay out of it. */
static int make_room_to_repack(pagert_core *core, pagert_pin *pin)
{
    uint64_t missing = 0;
    for_each_page(core, pin, want);
    for (uint32_t k = 0; k < pin->access_count; k++)
        for (uint32_t i = 0; i < pin->accesses[k].span_count; i++)
            missing += core->pages[pin->accesses[k].span_first + i].copy[PAGERT_DEVICE] == COPY_NONE;
    int outcome = place_make_room(core, pin, missing > 0 ? missing : 1);
    for_each_page(core, pin, unwant);
    return outcome == PLACE_DONE && !is_quiet(core) ? PLACE_BUSY : outcome;
}

/* From a quiet state: see repack.c. */
static int repack(pagert_core *core, pagert_pin *pin)
{
    core->repacker = pin;
    int outcome = PLACE_BUSY;
    if (has_failed_page(core, pin))
        return outcome;
    while (outcome == PLACE_BUSY && is_quiet(core)) { /* a round of clean evictions leaves it quiet */
        if (pin->code < 0)
            return pin->code;
        outcome = make_room_to_repack(core, pin);
        if (outcome == PLACE_DONE || outcome == PLACE_BLOCKED) /* it may go without */
            outcome = repack_round(core, pin);
    }
    if (outcome == PLACE_DONE) {
        count_uses(core, pin);
        for_each_page(core, pin, hold);
    }
    return outcome;
}

/* What no transfer can change: the frames that other pins hold leave too few, or no run for one of the
 * windows. That several get in each other's way takes a search: see repack.c. */
static bool is_hopeless(pagert_core *core, pagert_pin *pin)
{
    uint64_t total = 0, unheld = 0, capacity = core->config.frame_count[PAGERT_DEVICE];
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        total += a->span_count;
        for (uint32_t i = 0; i < a->span_count; i++) {
            const page *p = &core->pages[a->span_first + i];
            unheld += p->holds == 0 || p->copy[PAGERT_DEVICE] == COPY_NONE;
        }
    }
    pin->frames_needed = total;
    pin->frames_unheld = capacity - core->held_frames;
    if (unheld > pin->frames_unheld)
        return true;
    return core->held_frames > 0 && !repack_fits_alone(core, pin);
}

/* Try to give the pin its windows. PLACE_DONE: its pages are held. Else nothing is. */
static int place(pagert_core *core, pagert_pin *pin)
{
    bool resident = true;
    for (uint32_t k = 0; k < pin->access_count && resident; k++)
        resident = is_window(core, pin->accesses[k].first_page, pin->accesses[k].page_count);
    if (pin->access_count != 1)
        find_spans(pin);
    else {
        pin->accesses[0].span_first = pin->accesses[0].first_page;
        pin->accesses[0].span_count = pin->accesses[0].page_count;
    }
    if (resident) {
        count_uses(core, pin);
        for_each_page(core, pin, hold);
        return PLACE_DONE;
    }
    if (is_hopeless(core, pin))
        return PAGERT_E_FRAMES;
    if (pin->code < 0) /* see pin_fail_waiters() */
        return pin->code;
    if (core->repacker != NULL && core->repacker != pin)
        return PLACE_BUSY; /* or they would undo each other's work for ever */
    pin->begun = 1;
    if (pin->state == PIN_REPACKING)
        return repack(core, pin);
    count_uses(core, pin);
    for_each_page(core, pin, want);
    int outcome = recall_pages(core, pin) ? place_spans(core, pin) : PLACE_BUSY;
    if (outcome == PLACE_DONE) {
        for_each_page(core, pin, fix);
        return outcome;
    }
    TELL(core, begun, core, pin);
    for_each_page(core, pin, unwant);
    if (outcome != PLACE_BLOCKED || pin->needed_at != 0) /* a guess is not worth more */
        return outcome;
    pin->state = PIN_REPACKING;
    return repack(core, pin);
}

static void enter_unready(pagert_core *core, pagert_pin *pin)
{
    pin->previous = NULL;
    pin->next = core->unready;
    if (pin->next != NULL)
        pin->next->previous = pin;
    core->unready = pin;
}

static void leave_unready(pagert_core *core, pagert_pin *pin)
{
    *(pin->previous != NULL ? &pin->previous->next : &core->unready) = pin->next;
    if (pin->next != NULL)
        pin->next->previous = pin->previous;
    if (core->repacker == pin)
        core->repacker = NULL;
}

/* A page that was to make room, by leaving or moving, has not, and no pin holds the page that was to come.
 * Pins for which room was being made may have counted on it: they fail, or they would try for ever. */
void pin_fail_waiters(pagert_core *core, const pagert_failure *failure, bool full)
{
    for (pagert_pin *pin = core->unready; pin != NULL; pin = pin->next) {
        if ((pin->state != PIN_WAITING && pin->state != PIN_REPACKING) || !pin->begun)
            continue;
        pin->failure = *failure;
        pin->code = full ? PAGERT_E_FULL : PAGERT_E_TRANSFER;
    }
}

static bool is_ready(const pagert_core *core, const pagert_access *access, uint32_t index)
{
    const page *p = &core->pages[index];
    if (has(p, PAGE_MOVING))
        return false;
    if (access->mode != PAGERT_READ && has(p, PAGE_IN_FLIGHT)) /* a copy is being read or written */
        return false;
    if (has(p, PAGE_OVERWRITE)) /* for the pin that overwrites; others wait until that has begun */
        return device_owns(core, index) && access_overwrites(core, access, index);
    return p->copy[PAGERT_DEVICE] == COPY_VALID;
}

/* 1: the page is ready for the access, 0: not yet, negative: its transfer failed, and so has the pin. */
static int look_at(const pagert_core *core, pagert_pin *pin, const pagert_access *access, uint32_t index)
{
    const page *p = &core->pages[index];
    if (!has(p, PAGE_FAILED))
        return is_ready(core, access, index);
    pin->failure = (pagert_failure){p->failed_page, p->failed_link, p->error};
    pin->code = has(p, PAGE_FULL) ? PAGERT_E_FULL : PAGERT_E_TRANSFER;
    pin->state = PIN_FAILED;
    return pin->code;
}

/* Every page was ready when the cursor passed it. Since then a writeback may have started, or the fetch of
 * a page that another pin no longer overwrites: writers look again, then drop the other copies. */
static int commit(pagert_core *core, pagert_pin *pin)
{
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->page_count && a->mode != PAGERT_READ; i++) {
            int outcome = look_at(core, pin, a, a->first_page + i);
            if (outcome != 1)
                return outcome;
        }
    }
    for (uint32_t k = 0; k < pin->access_count; k++) {
        pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->page_count && a->mode != PAGERT_READ; i++)
            page_commit_write(core, a->first_page + i);
        uint64_t frame = core->pages[a->first_page].frame[PAGERT_DEVICE];
        a->device_bytes = (frame << core->page_shift) + (a->offset_bytes & (core->config.page_bytes - 1));
    }
    core->counters.hits += pin->hits;
    core->counters.faults += pin->faults;
    leave_unready(core, pin);
    pin->state = PIN_READY;
    return 1;
}

static int poll_placed(pagert_core *core, pagert_pin *pin)
{
    for (; pin->access_cursor < pin->access_count; pin->access_cursor++, pin->page_cursor = 0) {
        const pagert_access *a = &pin->accesses[pin->access_cursor];
        for (; pin->page_cursor < a->page_count; pin->page_cursor++) {
            int outcome = look_at(core, pin, a, a->first_page + pin->page_cursor);
            if (outcome != 1)
                return outcome;
        }
    }
    return commit(core, pin);
}

int pagert_pin_poll(pagert_core *core, pagert_pin *pin)
{
    if (pin->state == PIN_READY)
        return 1;
    if (pin->state == PIN_FAILED || pin->state == PIN_REFUSED)
        return pin->code;
    if (pin->state == PIN_WAITING || pin->state == PIN_REPACKING) {
        int outcome;
        bool again;
        do {
            outcome = place(core, pin);
            bool quiet = is_quiet(core);
            lower_grant_host(core); /* if that ends all that was going on, nobody will call again */
            again = outcome == PLACE_BUSY && !quiet && is_quiet(core);
            if (again) /* the victims found no room below: once more would end as this did */
                pin->state = PIN_REPACKING;
        } while (again);
        if (outcome == PLACE_BUSY)
            return 0;
        if (core->repacker == pin)
            core->repacker = NULL;
        if (outcome < 0) {
            pin->state = PIN_REFUSED;
            pin->code = outcome == PLACE_BLOCKED ? PAGERT_E_FRAMES : outcome;
            return pin->code;
        }
        pin->code = 0;
        pin->state = PIN_PLACED;
        TELL(core, placed, core, pin);
    }
    if (pin->state != PIN_PLACED)
        return PAGERT_E_STATE;
    int outcome = poll_placed(core, pin);
    lower_grant_host(core); /* a pin that writes gave back host frames */
    PAGERT_ASSERT_SLOW(core);
    return outcome;
}

/* `asked`: by an operator, so that the policy learns from it. */
static int start(pagert_core *core, pagert_pin *pin, bool asked)
{
    if (pin->state != PIN_IDLE)
        return PAGERT_E_STATE;
    if (pin->access_count == 0)
        return PAGERT_E_ARGUMENT;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        pagert_access *a = &pin->accesses[k];
        if (a->mode > PAGERT_OVERWRITE)
            return PAGERT_E_ARGUMENT;
        int code = region_pages(core, a->region, a->offset_bytes, a->size_bytes, &a->first_page,
                                &a->page_count);
        if (code < 0)
            return code;
        for (uint32_t i = 0; i < a->page_count; i++) /* each access of a page counts as one hold */
            if (core->pages[a->first_page + i].holds > UINT16_MAX - pin->access_count)
                return PAGERT_E_STATE;
    }
    if (pin->access_count > UINT16_MAX)
        return PAGERT_E_ARGUMENT;
    if (asked)
        TELL(core, accessed, core, pin);
    pin->access_cursor = pin->page_cursor = 0;
    pin->begun = 0;
    pin->code = 0;
    pin->state = PIN_WAITING;
    enter_unready(core, pin);
    int outcome = pagert_pin_poll(core, pin);
    if (outcome < 0)
        pagert_unpin(core, pin);
    return outcome;
}

int pagert_pin_start(pagert_core *core, pagert_pin *pin)
{
    if (pin->state == PIN_IDLE)
        pin->needed_at = 0;
    return start(core, pin, true);
}

int pagert_unpin(pagert_core *core, pagert_pin *pin)
{
    if (pin->state == PIN_IDLE)
        return PAGERT_E_STATE;
    uint32_t state = pin->state;
    if (state != PIN_READY)
        leave_unready(core, pin);
    pin->state = PIN_IDLE; /* it may be started again */
    if (state == PIN_READY || state == PIN_PLACED || state == PIN_FAILED) {
        for_each_page(core, pin, let_go);
        TELL(core, let_go, core, pin);
    }
    if (state == PIN_PLACED || state == PIN_FAILED)
        for_each_page(core, pin, fetch_for_readers);
    lower_grant_host(core);
    PAGERT_ASSERT_SLOW(core);
    return 0;
}

/* A pin that found no room yet holds nothing: what it needs could go, and come back, without end. */
bool pin_is_waited_for(const pagert_core *core)
{
    for (const pagert_pin *pin = core->unready; pin != NULL; pin = pin->next)
        if (pin->state == PIN_WAITING || pin->state == PIN_REPACKING)
            return true;
    return false;
}

/* As pagert_prefetch(); `needed_at`: for the policy, when it expects an operator to need these pages, else 0. */
int pin_prefetch(pagert_core *core, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes,
                 uint32_t needed_at)
{
    pagert_access access = {.region = region, .offset_bytes = offset_bytes, .size_bytes = size_bytes};
    pagert_pin pin = {.accesses = &access, .access_count = 1, .needed_at = needed_at};
    pagert_counters before = core->counters;
    int outcome = start(core, &pin, false);
    core->counters.hits = before.hits; /* nobody asked for it yet */
    core->counters.faults = before.faults;
    if (outcome < 0)
        return outcome;
    bool placed = pin.state != PIN_WAITING && pin.state != PIN_REPACKING;
    if (placed)
        core->counters.prefetches += pin.faults;
    pagert_unpin(core, &pin);
    return placed;
}

int pagert_prefetch(pagert_core *core, pagert_region region, uint64_t offset_bytes, uint64_t size_bytes)
{
    return pin_prefetch(core, region, offset_bytes, size_bytes, 0);
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * plan: which pages stay on the device between two uses.
 *
 * Between two uses of a page lies a gap. If the page stays, it takes a frame from everybody else for as long; if
 * it leaves, it is fetched again (unless it is overwritten or released next), and written first where it is
 * dirty. Where all gaps cost the same, the one that ends last gives way (Belady), and no plan is needed. Where
 * some cost nothing, some one and some two transfers, to give way to the furthest use costs up to a quarter
 * more than need be: which gaps to keep is then an interval packing problem.
 *
 * It is solved by prices. A frame has a price at every operator. A gap is kept if that costs less than its
 * transfers; prices rise where more is kept than fits, and fall where less is: multiplicative weights (Plotkin,
 * Shmoys, Tardos 1995; Arora, Hazan, Kale 2012). The share of the rounds in which a gap was kept is the share
 * of its pages to keep: that average is feasible and optimal but for what more rounds would bring.
 *
 * The period that is planned is the last one of the history, closed to a circle. The work is done in slices,
 * a few with each access, and costs nothing while things go on as planned.
 */
#ifndef PAGERT_PLAN_H
#define PAGERT_PLAN_H

#include "history.h"

enum { PLAN_IDLE, PLAN_FIND, PLAN_LINK, PLAN_PRICE, PLAN_WEIGH, PLAN_CHOOSE, PLAN_PUBLISH };

#define KEEP_ALL (NONE - 1) /* as an event's `keep` */

/* Pages between two uses. Operators are counted from the start of the period. */
typedef struct gap {
    uint32_t event;      /* at its end, counted from the first of the period */
    uint32_t start, end; /* operators it spans: start <= number < end, on the circle if it wraps */
    uint32_t pages;
    uint32_t root;  /* the first gap since the pages were written, if that is in the period, else NONE: the
                       first of them in which pages leave costs their writeback */
    uint16_t kept;  /* rounds */
    bool wraps;
    bool fetched; /* whether pages that left are read back at its end */
} gap;

enum { RANKS = 8, KINDS = 4 }; /* what tells gaps apart: see kind_of_gap() */

typedef struct plan {
    uint32_t stage, at, round;
    uint32_t first, event_count; /* the period: events of the history */
    uint32_t operator_count, gap_count;
    bool written;   /* something in the period writes: else every gap costs the same, and nothing is planned */
    uint32_t room;  /* frames that operators, and what stays between them, may fill */
    int32_t load;   /* pages that stay over the operator that is priced */
    uint32_t rank;  /* of the event among the accesses of its operator, while the result is written */
    int32_t owed[RANKS * KINDS * KINDS]; /* pages that should have stayed, and did not yet: see in_whole_windows() */
    gap *gaps;
    uint32_t *operator_of; /* each event */
    uint32_t *gap_of;      /* each event: the gap that it ends, or NONE */
    uint32_t *needed;      /* each operator: pages that it uses */
    int32_t *change;       /* each operator: pages kept from there on more than before it */
    float *price;          /* each operator: of one frame, in transfers */
    double *paid;          /* each operator: the sum of the prices before it; and of all at the end */
    double *saved;         /* each root: what leaving saves in all its gaps, without the writeback */
} plan;

uint64_t plan_bytes(void);
void plan_init(plan *p, unsigned char *memory);

/* Plan the period that ended with the last event, for `room` frames. Called after the last access of a pin. */
void plan_begin(plan *p, const history *past, uint32_t room);

/* Whether that would be worth while: the sequence is known and has not been planned. */
bool plan_is_due(const plan *p, const history *past);

/* Go on with it: about `steps` steps of a few nanoseconds. True when this finished it. */
bool plan_advance(plan *p, history *past, uint32_t steps);

static inline bool plan_is_idle(const plan *p) { return p->stage == PLAN_IDLE; }

#endif

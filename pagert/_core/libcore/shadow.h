/* SPDX-License-Identifier: Apache-2.0
 *
 * shadow: what LRU would have moved, so that another policy never moves much more.
 *
 * A policy that predicts can be wrong all the time, and each wrong choice costs transfers. So LRU is played
 * beside it, without bytes: which pages it would have on the device by now, which of them dirty, and how many
 * pages it would have fetched and written (`lru_moved`). Beside that stands what was really moved, and what
 * is still due: an upper bound of what may yet be moved beyond LRU if from here on its order is followed. It
 * is a sum over pages, of
 *
 *   1  for a fetch that is decided and not done,
 *   1  for a writeback that is decided and not done,
 *   1  for a page that LRU has and the device has not: a fetch that LRU is spared,
 *   1  for a page that is dirty on the device and not in LRU's: a writeback that LRU is spared or has paid.
 *
 * The rule is:  moved + due <= 1.10 lru_moved, at all times.  It holds because
 *
 *   - what has to be done never raises `moved + due` by more than `lru_moved`. A page that a pin needs and
 *     LRU has not costs both a fetch; one that LRU alone has was due before. When LRU evicts, it pays for
 *     the writeback that becomes due. A transfer that ends goes from due to moved; one that fails or is
 *     withdrawn leaves as much due as before it was decided;
 *   - a choice (a victim, a prefetch, a writeback ahead of time) is made only where what it adds keeps the
 *     rule. Else the victim is a page that LRU has not, for which no more is due when it leaves. If there is
 *     none, LRU has all that is at rest on the device, and has made room for the pin besides: so what takes
 *     the room here is in transit, and is waited for. If nothing is, a window needs frames beyond its
 *     pages (place.c, repack.c), as windows do under LRU, and LRU evicts the same page.
 *
 * So `moved` never exceeds 1.10 of what LRU moves, from the first page on. What this leaves out: the links
 * below the device's; and a clean page whose copy below was dropped for lack of room, so that it has to be
 * written again. Where LRU has the page, too, it is dirty there likewise, else it is `excused`.
 *
 * LRU here: pages stand in the order of their last use, and a use ends when the pin lets go. It evicts at once,
 * and never what is held.
 */
#ifndef PAGERT_SHADOW_H
#define PAGERT_SHADOW_H

#include "internal.h"

typedef struct shadow {
    page_link *links; /* of each page: in one of the two lists, or in none */
    uint8_t *flags;
    page_list kept;   /* pages that LRU has on the device, oldest use first. No more than there are frames */
    page_list spares; /* evictable pages that it has not */
    uint64_t moved;   /* pages that crossed the device's border */
    uint64_t due;     /* the sum above, and of each page in its flags */
    uint64_t lru_moved;
    uint64_t excused;
    uint64_t intended; /* pages that a prefetch will make due, once there is room for them */
    uint32_t uses;     /* numbers the uses of pins */
    uint32_t unpaid;   /* pages that LRU has without a fetch, for a pin that is going to overwrite them */
} shadow;

/* The shadow stands first in the state of its policy, in whose table the functions below can then stand. */
uint64_t shadow_bytes(const pagert_config *config);
void shadow_init(pagert_core *core, unsigned char *memory);

/* The pin comes next: its entries can be on their way to the processor while it does other things. */
void shadow_expect(pagert_core *core, const pagert_pin *pin);

/* What the policy asks: whether it may evict this page, or write it ahead of time; */
bool shadow_affords_leaving(const pagert_core *core, uint32_t index, victim_need need);
bool shadow_affords_cleaning(const pagert_core *core, uint32_t index);
/* whether these pages may be fetched ahead: until the next question, victims for that must leave enough for it; */
bool shadow_affords_fetch(pagert_core *core, uint32_t first_page, uint32_t page_count);
/* evictable pages that LRU has not, which cost nothing: first those that it evicted first; */
const page_list *shadow_spares(const pagert_core *core);
/* the victim where the policy's own cannot be afforded. NONE: wait, or there is none. */
uint32_t shadow_victim(pagert_core *core, victim_need need);

/* What it hears of: see pagert_policy. */
void shadow_making_room(pagert_core *core, const pagert_pin *pin);
void shadow_begun(pagert_core *core, const pagert_pin *pin);
void shadow_placed(pagert_core *core, pagert_pin *pin);
void shadow_let_go(pagert_core *core, const pagert_pin *pin);
void shadow_changed(pagert_core *core, uint32_t index);
void shadow_written(pagert_core *core, uint32_t index);
void shadow_not_overwritten(pagert_core *core, uint32_t index);
void shadow_sent_away(pagert_core *core, uint32_t index);
void shadow_copy_lost(pagert_core *core, uint32_t index);
void shadow_flushed(pagert_core *core);
void shadow_transferred(pagert_core *core, uint32_t link, uint32_t page_count);
int shadow_check(const pagert_core *core);

#endif

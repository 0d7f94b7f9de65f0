/* SPDX-License-Identifier: Apache-2.0
 *
 * heap: pages by the time of their next use, furthest first. Where a page stands in it is remembered, so that it can
 * be taken out anywhere: in its heap_index while it is evictable, or beside its host frame.
 */
#ifndef PAGERT_HEAP_H
#define PAGERT_HEAP_H

#include "internal.h"

typedef struct heap_item {
    uint32_t time, page;
} heap_item;

typedef struct heap {
    heap_item *items;
    uint32_t count;
    uint32_t *host_indices; /* of host frames; NULL: of evictable pages */
} heap;

static inline uint64_t heap_bytes(const pagert_config *config, uint32_t tier)
{
    return (uint64_t)config->frame_count[tier] * sizeof(heap_item);
}

static inline uint32_t *heap_index_of(pagert_core *core, const heap *h, uint32_t index)
{
    page *p = &core->pages[index];
    return h->host_indices != NULL ? &h->host_indices[p->frame[PAGERT_HOST]] : &p->heap_index;
}

static inline uint32_t heap_time(pagert_core *core, const heap *h, uint32_t index)
{
    return h->items[*heap_index_of(core, h, index)].time;
}

static inline void heap_put(pagert_core *core, heap *h, uint32_t at, heap_item item)
{
    h->items[at] = item;
    *heap_index_of(core, h, item.page) = at;
}

static inline void heap_sift_up(pagert_core *core, heap *h, uint32_t at, heap_item item)
{
    while (at > 0 && h->items[(at - 1) / 2].time < item.time) {
        heap_put(core, h, at, h->items[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_put(core, h, at, item);
}

static inline void heap_sift_down(pagert_core *core, heap *h, uint32_t at, heap_item item)
{
    for (uint32_t child = 2 * at + 1; child < h->count; child = 2 * at + 1) {
        if (child + 1 < h->count && h->items[child + 1].time > h->items[child].time)
            child++;
        if (h->items[child].time <= item.time)
            break;
        heap_put(core, h, at, h->items[child]);
        at = child;
    }
    heap_put(core, h, at, item);
}

static inline void heap_push(pagert_core *core, heap *h, uint32_t index, uint32_t time)
{
    heap_sift_up(core, h, h->count++, (heap_item){time, index});
}

static inline void heap_remove(pagert_core *core, heap *h, uint32_t index)
{
    uint32_t at = *heap_index_of(core, h, index);
    heap_item last = h->items[--h->count];
    if (last.page == index)
        return;
    if (at > 0 && h->items[(at - 1) / 2].time < last.time)
        heap_sift_up(core, h, at, last);
    else
        heap_sift_down(core, h, at, last);
}

#endif

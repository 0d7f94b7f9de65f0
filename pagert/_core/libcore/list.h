/* SPDX-License-Identifier: Apache-2.0
 *
 * Doubly linked lists of pages through their links[kind]: oldest at one end, youngest at the other. A list
 * that is all zero must be initialised, since page 0 is a page.
 */
#ifndef PAGERT_LIST_H
#define PAGERT_LIST_H

#include "internal.h"

static inline void list_init(page_list *list) { *list = (page_list){NONE, NONE, 0}; }

static inline void list_append(pagert_core *core, page_list *list, uint32_t kind, uint32_t index)
{
    page_link *link = &core->pages[index].links[kind];
    link->older = list->youngest;
    link->younger = NONE;
    if (list->youngest == NONE)
        list->oldest = index;
    else
        core->pages[list->youngest].links[kind].younger = index;
    list->youngest = index;
    list->count++;
}

static inline void list_remove(pagert_core *core, page_list *list, uint32_t kind, uint32_t index)
{
    page_link link = core->pages[index].links[kind];
    if (link.older == NONE)
        list->oldest = link.younger;
    else
        core->pages[link.older].links[kind].younger = link.younger;
    if (link.younger == NONE)
        list->youngest = link.older;
    else
        core->pages[link.younger].links[kind].older = link.older;
    PAGERT_ASSERT(list->count > 0);
    list->count--;
}

#endif

/* SPDX-License-Identifier: Apache-2.0
 *
 * lru: the victim is the page that was let go of longest ago.
 */
#include "list.h"

static uint64_t state_bytes(const pagert_config *config)
{
    (void)config;
    return sizeof(page_list);
}

static void init(pagert_pager *pager) { list_init(pager->policy_state); }

static void insert(pagert_pager *pager, uint32_t page_index)
{
    list_append(pager, pager->policy_state, LIST_POLICY, page_index);
}

static void remove_page(pagert_pager *pager, uint32_t page_index)
{
    list_remove(pager, pager->policy_state, LIST_POLICY, page_index);
}

static uint32_t victim(pagert_pager *pager, victim_need need)
{
    const page_list *list = pager->policy_state;
    uint32_t index = list->oldest;
    while (need.clean_only && index != NONE && !is_clean(&pager->pages[index]))
        index = pager->pages[index].links[LIST_POLICY].younger;
    return index;
}

static uint32_t evictable_count(const pagert_pager *pager)
{
    return ((const page_list *)pager->policy_state)->count;
}

const pagert_policy policy_lru = {
    .name = "lru",
    .state_bytes = state_bytes,
    .init = init,
    .insert = insert,
    .remove = remove_page,
    .victim = victim,
    .evictable_count = evictable_count,
};

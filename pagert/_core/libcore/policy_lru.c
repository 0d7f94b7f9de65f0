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

static void init(pagert_core *core) { list_init(core->policy_state); }

static void insert(pagert_core *core, uint32_t page_index)
{
    list_append(core, core->policy_state, LIST_POLICY, page_index);
}

static void remove_page(pagert_core *core, uint32_t page_index)
{
    list_remove(core, core->policy_state, LIST_POLICY, page_index);
}

static uint32_t victim(pagert_core *core, victim_need need)
{
    const page_list *list = core->policy_state;
    uint32_t index = list->oldest;
    while (need.clean_only && index != NONE && !is_clean(&core->pages[index]))
        index = core->pages[index].links[LIST_POLICY].younger;
    return index;
}

static uint32_t evictable_count(const pagert_core *core)
{
    return ((const page_list *)core->policy_state)->count;
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

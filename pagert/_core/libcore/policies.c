/* SPDX-License-Identifier: Apache-2.0
 *
 * policies: which there are, by name.
 */
#include "internal.h"

static const pagert_policy *const policies[] = {&policy_lru, &policy_lookahead};
enum { POLICY_COUNT = sizeof(policies) / sizeof(policies[0]) };

const char *pagert_policy_name(uint32_t number) { return number < POLICY_COUNT ? policies[number]->name : NULL; }

const pagert_policy *pagert_policy_named(const char *name)
{
    for (uint32_t number = 0; number < POLICY_COUNT; number++) {
        const char *own = policies[number]->name, *asked = name;
        while (*own != '\0' && *own == *asked) {
            own++;
            asked++;
        }
        if (*own == *asked)
            return policies[number];
    }
    return NULL;
}

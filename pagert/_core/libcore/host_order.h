/* SPDX-License-Identifier: Apache-2.0
 *
 * host_order: which host copy gives way to another, by what the history knows. As on the device, a page has a
 * price, of one transfer or two or nothing, and the longest time until use for each transfer paid goes first.
 */
#ifndef PAGERT_HOST_ORDER_H
#define PAGERT_HOST_ORDER_H

#include "heap.h"
#include "history.h"

enum { HOST_PRICES = 3 };

typedef struct host_order {
    heap prices[HOST_PRICES]; /* pages whose fastest copy is the host's, by the transfers that their going costs */
    uint8_t *standing;        /* of each host frame: 1 + the heap of its page, 0: in none */
} host_order;

uint64_t host_order_bytes(const pagert_config *config);
void host_order_init(host_order *order, const pagert_config *config, unsigned char *memory);
void host_order_insert(pagert_core *core, host_order *order, const history *past, uint32_t index);
void host_order_remove(pagert_core *core, host_order *order, uint32_t index);

/* The page that goes best, or NONE where the history does not know. */
uint32_t host_order_victim(pagert_core *core, host_order *order, const history *past);

#endif

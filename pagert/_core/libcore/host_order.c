/* SPDX-License-Identifier: Apache-2.0
 *
 * host_order: see host_order.h. Keys are times on the history's clock, as in policy_lookahead.c, and a victim's
 * is checked.
 */
#include "host_order.h"

enum { RECHECKS_MAX = 32 };

uint64_t host_order_bytes(const pagert_config *config)
{
    uint64_t frames = config->frame_count[PAGERT_HOST];
    return (HOST_PRICES * heap_bytes(config, PAGERT_HOST) + frames * (sizeof(uint32_t) + 1) + 63) / 64 * 64;
}

void host_order_init(host_order *order, const pagert_config *config, unsigned char *memory)
{
    uint32_t *indices = (uint32_t *)(void *)(memory + HOST_PRICES * heap_bytes(config, PAGERT_HOST));
    for (uint32_t price = 0; price < HOST_PRICES; price++)
        order->prices[price] = (heap){
            .items = (heap_item *)(void *)(memory + price * heap_bytes(config, PAGERT_HOST)), .host_indices = indices};
    order->standing = (uint8_t *)(indices + config->frame_count[PAGERT_HOST]);
}

/* What it costs that the page goes to flash, and comes back if it is read next. HOST_PRICES: not known. */
static uint32_t price_of(const pagert_core *core, const history *past, uint32_t index, uint32_t *time)
{
    const page *p = &core->pages[index];
    use next;
    if (!history_next_use(past, p->region, index - p->region, &next))
        return HOST_PRICES;
    *time = next.time;
    bool read_next = next.event->kind == EVENT_READ || next.event->kind == EVENT_UPDATE;
    return (uint32_t)read_next + (p->copy[PAGERT_FLASH] != COPY_VALID);
}

static uint8_t *standing_of(const pagert_core *core, host_order *order, uint32_t index)
{
    return &order->standing[core->pages[index].frame[PAGERT_HOST]];
}

void host_order_insert(pagert_core *core, host_order *order, const history *past, uint32_t index)
{
    uint32_t time = 0, price = price_of(core, past, index, &time);
    *standing_of(core, order, index) = (uint8_t)(price < HOST_PRICES ? price + 1 : 0);
    if (price < HOST_PRICES)
        heap_push(core, &order->prices[price], index, time);
}

void host_order_remove(pagert_core *core, host_order *order, uint32_t index)
{
    uint8_t *standing = standing_of(core, order, index);
    if (*standing > 0)
        heap_remove(core, &order->prices[*standing - 1], index);
    *standing = 0;
}

static uint32_t best_price(const host_order *order, const history *past)
{
    uint32_t best = HOST_PRICES;
    uint64_t best_worth = 0;
    for (uint32_t price = 0; price < HOST_PRICES; price++) {
        const heap *h = &order->prices[price];
        if (h->count == 0)
            continue;
        if (price == 0)
            return price;
        uint64_t wait = h->items[0].time > past->now ? h->items[0].time - past->now : 0;
        if (wait * 2 / price + 1 > best_worth) {
            best = price;
            best_worth = wait * 2 / price + 1;
        }
    }
    return best;
}

uint32_t host_order_victim(pagert_core *core, host_order *order, const history *past)
{
    for (uint32_t checks = 0; checks < RECHECKS_MAX && history_is_sure(past); checks++) {
        uint32_t price = best_price(order, past), time = 0;
        if (price == HOST_PRICES)
            return NONE;
        heap_item top = order->prices[price].items[0];
        if (price_of(core, past, top.page, &time) == price && time == top.time)
            return top.page;
        host_order_remove(core, order, top.page);
        host_order_insert(core, order, past, top.page);
    }
    return NONE;
}

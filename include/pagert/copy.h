/* SPDX-License-Identifier: Apache-2.0
 *
 * The host engine: copies and fills memory on threads of its own, so that neither the pump nor the
 * caller spends its time on it. Large requests are cut so that all threads share them.
 */
#ifndef PAGERT_COPY_H
#define PAGERT_COPY_H

#include "pagert/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pagert_copy pagert_copy;

int pagert_copy_open(uint32_t thread_count, pagert_copy **copy); /* 0 or -errno */
pagert_engine pagert_copy_engine(pagert_copy *copy);
void pagert_copy_close(pagert_copy *copy); /* waits for what is in flight */

#ifdef __cplusplus
}
#endif
#endif

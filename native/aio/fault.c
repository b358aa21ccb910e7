/* Injected faults: one seeded decision per transfer, so that a failing run can be repeated. */
#include <errno.h>

#include "aio.h"

enum { RATE_ONE = 1 << 16 };

/* splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t draw(zn_fault_state *state) {
  uint64_t z = state->random += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/* Uniform in [low, high]. */
static int64_t draw_between(zn_fault_state *state, int64_t low, int64_t high) {
  return low + (int64_t)(draw(state) % (uint64_t)(high - low + 1));
}

static bool is_rate(int32_t rate) { return rate >= 0 && rate <= RATE_ONE; }

bool zn_fault_is_valid(const zn_aio_fault *plan) {
  if (!is_rate(plan->fail_rate) || !is_rate(plan->short_rate) || !is_rate(plan->delay_rate)) return false;
  if (plan->fail_rate > 0 && plan->status >= 0) return false;
  if (plan->begin < 0 || (plan->end != 0 && plan->end <= plan->begin)) return false;
  return plan->delay_us >= 0 && plan->skip >= 0 && plan->count_max >= 0;
}

void zn_fault_reset(zn_fault_state *state, const zn_aio_fault *plan) {
  *state = (zn_fault_state){.plan = *plan, .random = plan->seed};
}

/* O_DIRECT needs aligned transfers, so a cut inside a page is simulated by hiding part of the count. */
static bool cut(zn_fault_state *state, int64_t nbytes, bool is_direct, int64_t *asked_bytes,
                int64_t *hidden_bytes) {
  if (!is_direct) {
    if (nbytes < 2) return false;
    *asked_bytes = draw_between(state, 1, nbytes - 1);
    return true;
  }
  int64_t pages = (nbytes - 1) / ZN_DIRECT_BYTES;
  if (pages < 1) return false;
  pages = draw_between(state, 1, pages);
  *asked_bytes = pages * ZN_DIRECT_BYTES;
  *hidden_bytes = pages < 2 ? 0 : draw_between(state, 0, ZN_DIRECT_BYTES - 1);
  return true;
}

static bool is_hit(const zn_aio_fault *plan, int32_t op, int64_t offset, int64_t nbytes) {
  if ((plan->op_mask >> op & 1) == 0) return false;
  return plan->end == 0 || (offset < plan->end && offset + nbytes > plan->begin);
}

zn_fault_kind zn_fault_draw(zn_fault_state *state, int32_t op, int64_t offset, int64_t nbytes, bool is_direct,
                            int64_t *asked_bytes, int64_t *hidden_bytes) {
  const zn_aio_fault *plan = &state->plan;
  if (!is_hit(plan, op, offset, nbytes) || state->seen++ < plan->skip) return ZN_FAULT_NONE;
  if (plan->count_max > 0 && state->hits >= plan->count_max) return ZN_FAULT_NONE;
  int64_t dice = (int64_t)(draw(state) >> 48);
  zn_fault_kind kind = ZN_FAULT_NONE;
  if (dice < plan->fail_rate) {
    kind = ZN_FAULT_FAIL;
  } else if (dice < (int64_t)plan->fail_rate + plan->short_rate) {
    if (op != ZN_AIO_SYNC && cut(state, nbytes, is_direct, asked_bytes, hidden_bytes)) kind = ZN_FAULT_SHORT;
  } else if (dice < (int64_t)plan->fail_rate + plan->short_rate + plan->delay_rate) {
    kind = ZN_FAULT_DELAY;
  }
  if (kind != ZN_FAULT_NONE) state->hits++;
  return kind;
}

/* The update of one element for each optimizer: for the CPU, where it is included once per instruction set, and for
 * CUDA.
 *
 * Each optimizer is a case of `update_one`; its states are a, b, c in the order of zn_abi.h, and `present` has a bit
 * for each. `rule` and `present` are constants on the CPU. Every operation is rounded on its own, except ZN_FMAF, which
 * is rounded once, as torch does in x.add(y, alpha), addcmul and lerp. The order of operations is torch's; for Adam it
 * is the one in zn_abi.h.
 *
 * The includer defines ZN_NAME, ZN_INLINE, ZN_FMAF and ZN_SQRTF. */

ZN_INLINE void ZN_NAME(update_one)(int rule, int present, const zn_segment *s, float *w, float g, float *a, float *b,
                                   float *c) {
  if (s->l2 != 0.0f) g = rule == ZN_ADAM ? g + s->l2 * *w : ZN_FMAF(s->l2, *w, g);
  if (s->decay != 1.0f) *w = *w * s->decay;
  switch (rule) {
    case ZN_ADAM:
      *a = *a + s->one_minus_beta1 * (g - *a);
      *b = *b * s->beta2 + s->one_minus_beta2 * (g * g);
      *w = *w - s->step_size * (*a / (ZN_SQRTF(*b) + s->eps));
      break;
    case ZN_LION: {
      const float direction = ZN_FMAF(s->one_minus_beta1, g, *a * s->beta1);
      const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : 0.0f;
      *w = *w - s->step_size * sign;
      *a = ZN_FMAF(s->one_minus_beta2, g, *a * s->beta2);
      break;
    }
    case ZN_SGD:
      if (present & 1) {
        *a = s->flags & ZN_FIRST ? g : ZN_FMAF(s->one_minus_beta1, g, *a * s->beta1);
        g = s->flags & ZN_NESTEROV ? ZN_FMAF(s->beta1, *a, g) : *a;
      }
      *w = ZN_FMAF(-s->step_size, g, *w);
      break;
    case ZN_ADAGRAD:
      *a = ZN_FMAF(g, g, *a);
      *w = *w - s->step_size * g / (ZN_SQRTF(*a) + s->eps);
      break;
    case ZN_RMSPROP: {
      float square = *a = ZN_FMAF(s->one_minus_beta2 * g, g, *a * s->beta2);
      if (present & 4) { /* lerp, from the nearer end */
        const float share = s->one_minus_beta2, way = g - *c;
        *c = share < 0.5f ? ZN_FMAF(share, way, *c) : ZN_FMAF(share - 1.0f, way, g);
        square = ZN_FMAF(-*c, *c, square);
      }
      const float root = ZN_SQRTF(square) + s->eps;
      if (present & 2) {
        *b = *b * s->beta1 + g / root;
        *w = ZN_FMAF(-s->step_size, *b, *w);
      } else {
        *w = *w - s->step_size * g / root;
      }
      break;
    }
  }
}

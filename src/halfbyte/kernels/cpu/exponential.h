// The exponential of sixteen lanes, where it must be inlined: softmax and swiglu take many at a time.
#pragma once
#include "vector.h"

namespace halfbyte {

// exp(x): 2^n times a polynomial on half a unit of n around 0; under 2 ulp, subnormals and infinities included.
HB_INLINE Floats exponential(Floats x) {
    Floats clamped = at_least(at_most(x, splat(89.0f)), splat(-104.0f));
    Floats n = nearest(mul(clamped, splat(1.44269504f)));
    // ln 2 in two parts, the first short enough that n times it is exact.
    Floats r = fma(n, splat(-0.693145752f), clamped);
    r = fma(n, splat(-1.42860677e-6f), r);
    Floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), splat(1.0f));
    // In two steps, because 2^n alone may be too large or too small for a normal number.
    Ints whole = to_ints(n), first = half(whole);
    return mul(mul(p, power_of_two(first)), power_of_two(sub(whole, first)));
}

// exp(x) for a softmax, x at most 0: what is below e^-87 of the largest is zero. A subnormal result would stop the CPU for
// a hundred cycles, and keys that are not seen (-infinity) are of that kind.
HB_INLINE Floats soft_exponential(Floats x) {
    Floats seen = at_least(at_most(fma(x, splat(1e30f), splat(87e30f)), splat(1.0f)), splat(0.0f));  // 0 or 1
    return mul(exponential(at_least(x, splat(-87.0f))), seen);
}

}  // namespace halfbyte

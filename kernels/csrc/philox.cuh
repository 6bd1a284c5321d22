// Philox4x32-10: random words as a pure function of a counter and a key, the same as kernels/philox.py.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.
#pragma once

#include "device.cuh"

namespace stoker {

struct Words {
    uint32_t w0, w1, w2, w3;
};

__device__ __forceinline__ Words philox(Words c, uint64_t key) {
    constexpr uint32_t kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t low0 = kFirst * c.w0, high0 = __umulhi(kFirst, c.w0);
        const uint32_t low1 = kSecond * c.w2, high1 = __umulhi(kSecond, c.w2);
        c = {high1 ^ c.w1 ^ k0, low1, high0 ^ c.w3 ^ k1, low0};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

}  // namespace stoker

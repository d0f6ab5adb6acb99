// The sign of a zero, by which buckets know slots to which no rank has contributed.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

namespace vescale {

// Replaces -0.0 at `place` by 0.0.
template <class Bits>
void zero_sign_at(void* place) {
    Bits bits;
    std::memcpy(&bits, place, sizeof(Bits));
    if (bits == static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1))) {
        std::memset(place, 0, sizeof(Bits));
    }
}

// Whether `zero_sign` knows a dtype.
inline bool has_zero_signs(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
        case at::kDouble:
        case at::kHalf:
        case at::kBFloat16:
            return true;
        default:
            return false;
    }
}

// Replaces -0.0 by 0.0 in the first element of a tensor that is not empty, on the CPU, of such a dtype.
inline void zero_sign(const at::Tensor& tensor) {
    void* first = tensor.mutable_data_ptr();
    switch (tensor.scalar_type()) {
        case at::kHalf:
        case at::kBFloat16:
            return zero_sign_at<std::uint16_t>(first);
        case at::kFloat:
            return zero_sign_at<std::uint32_t>(first);
        case at::kDouble:
            return zero_sign_at<std::uint64_t>(first);
        default:
            return;
    }
}

}  // namespace vescale

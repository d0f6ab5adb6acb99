// Memory of tensors, which may have been freed under them.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>

#include <cstdint>

namespace vescale {

// Whether the memory of a strided tensor has all its elements: nobody has freed it under the tensor.
inline bool has_memory(const at::Tensor& tensor) {
    if (!tensor.has_storage() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
        return false;
    }
    if (tensor.numel() == 0) {
        return true;
    }
    auto last = static_cast<std::uint64_t>(tensor.storage_offset());
    for (const auto i : c10::irange(tensor.dim())) {
        last += static_cast<std::uint64_t>((tensor.size(i) - 1) * tensor.stride(i));
    }
    return (last + 1) * tensor.element_size() <= tensor.storage().nbytes();
}

}  // namespace vescale

// Losses of outputs that are DTensors and of plain labels of other sizes. PyTorch compares the sizes above the Python key,
// where nobody can tell that these are the labels of one rank's rows: Python is asked first, and may raise.

#pragma once

#include "composite.h"
#include "mixed.h"

#include <ATen/ops/broadcast_tensors_ops.h>
#include <ATen/ops/cross_entropy_loss_ops.h>
#include <ATen/ops/nll_loss_nd_ops.h>

namespace vescale {

inline void ask_about_sizes(const char* op, const at::Tensor& output, const at::Tensor& labels) {
    Gil gil;
    if (mixed_calls() && dtensor_of(output) != nullptr && !labels.key_set().has(c10::DispatchKey::Python)) {
        mixed_calls()(op, "", py::make_tuple(output, labels), py::dict());
    }
}

inline void ask_about_rows(const char* op, const at::Tensor& scores, const at::Tensor& labels) {
    if (scores.dim() < 2 || labels.dim() == 0 || scores.size(0) == labels.size(0)) {
        return;
    }
    ask_about_sizes(op, scores, labels);
}

inline at::Tensor cross_entropy_loss(
    c10::DispatchKeySet keys, const at::Tensor& scores, const at::Tensor& labels, const std::optional<at::Tensor>& weight,
    std::int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
    ask_about_rows("aten::cross_entropy_loss", scores, labels);
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    return at::_ops::cross_entropy_loss::redispatch(
        below(keys), scores, labels, weight, reduction, std::move(ignore_index), label_smoothing);
}

inline at::Tensor nll_loss_nd(
    c10::DispatchKeySet keys, const at::Tensor& scores, const at::Tensor& labels, const std::optional<at::Tensor>& weight,
    std::int64_t reduction, c10::SymInt ignore_index) {
    ask_about_rows("aten::nll_loss_nd", scores, labels);
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    return at::_ops::nll_loss_nd::redispatch(below(keys), scores, labels, weight, reduction, std::move(ignore_index));
}

// Of mse_loss and its like.
inline std::vector<at::Tensor> broadcast_tensors(c10::DispatchKeySet keys, at::TensorList tensors) {
    if (tensors.size() == 2 && !tensors[0].sizes().equals(tensors[1].sizes())) {
        ask_about_sizes("aten::broadcast_tensors", tensors[0], tensors[1]);
    }
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    return at::_ops::broadcast_tensors::redispatch(below(keys), tensors);
}

}  // namespace vescale

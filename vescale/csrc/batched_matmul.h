// `aten::matmul` of two batches of matrices on DTensors with one autograd node: attention without a fused kernel. PyTorch makes
// it of six ops, each with a node.

#pragma once

#include "composite.h"

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/matmul_ops.h>

namespace vescale {

inline Parts& matmul_forward() {
    static auto* made = new Parts("matmul");
    return *made;
}

inline Parts& matmul_backward() {
    static auto* made = new Parts("matmul_backward");
    return *made;
}

// All dims but the last two as one.
inline at::Tensor one_batch(const at::Tensor& tensor) {
    const auto batch = c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 2));
    return tensor.reshape({batch, tensor.size(-2), tensor.size(-1)});
}

// The batch's dims in place again.
inline std::vector<std::int64_t> unflattened(const at::Tensor& like, const at::Tensor& matrices) {
    auto sizes = like.sizes().vec();
    sizes[sizes.size() - 2] = matrices.size(1);
    sizes[sizes.size() - 1] = matrices.size(2);
    return sizes;
}

// As at::native::matmul where the batches have the same sizes. The operands: both factors.
inline std::vector<at::Tensor> run_matmul(c10::ArrayRef<at::Tensor> operands) {
    const auto product = at::bmm(one_batch(operands[0]), one_batch(operands[1]));
    return {at::_unsafe_view(product, unflattened(operands[0], product))};
}

// As the backward of bmm. The operands: gradient, and the factors. The results: the wanted gradients of the factors, in the
// order in which PyTorch computes them.
inline std::vector<at::Tensor> run_matmul_backward(c10::ArrayRef<at::Tensor> operands, std::array<bool, 2> wanted) {
    const auto gradient = one_batch(operands[0]);
    std::vector<at::Tensor> found(2);
    if (wanted[1]) {
        const auto made = at::bmm(one_batch(operands[1]).transpose(1, 2), gradient);
        found[1] = made.view(unflattened(operands[0], made));
    }
    if (wanted[0]) {
        const auto made = at::bmm(gradient, one_batch(operands[2]).transpose(1, 2));
        found[0] = made.view(unflattened(operands[0], made));
    }
    return found;
}

class BatchedMatmulBackward final : public torch::autograd::Node {
  public:
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        if (!gradients[0].defined()) {
            return torch::autograd::variable_list(2);
        }
        std::array<at::Tensor, 3> operands;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            operands = {std::move(gradients[0]), first_.unpack(), second_.unpack()};
        }
        const std::array<bool, 2> wanted{task_should_compute_output(0), task_should_compute_output(1)};
        const auto run = [&](c10::ArrayRef<at::Tensor> given) { return run_matmul_backward(given, wanted); };
        const bool is_recorded = at::GradMode::is_enabled();  // for second derivatives
        if (is_recorded || !is_composable({&operands[0], &operands[1], &operands[2]})) {
            return run(operands);
        }
        return matmul_backward().run(operands, {static_cast<std::uint64_t>(wanted[0] << 1 | wanted[1])}, run);
    }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        first_.reset_data();
        second_.reset_data();
    }

    std::string name() const override { return "BatchedMatmulBackward"; }

    torch::autograd::SavedVariable first_;  // undefined where the other factor needs no gradient
    torch::autograd::SavedVariable second_;
};

// Whether PyTorch would make the op of one bmm of the factors as they are.
inline bool is_batched(const at::Tensor& first, const at::Tensor& second) {
    const auto num_dims = first.dim();
    return num_dims > 3 && second.dim() == num_dims && first.size(-1) == second.size(-2) &&
        first.sizes().slice(0, num_dims - 2) == second.sizes().slice(0, num_dims - 2) && first.numel() > 0 &&
        second.numel() > 0 && !first.is_complex() && !second.is_complex();
}

inline at::Tensor matmul(c10::DispatchKeySet keys, const at::Tensor& first, const at::Tensor& second) {
    if (!is_composable({&first, &second}) || !is_batched(first, second)) {
        const at::impl::MaybeSetTLSOnEntryGuard guard;
        return at::_ops::matmul::redispatch(below(keys), first, second);
    }
    const bool is_differentiable = torch::autograd::compute_requires_grad(first, second);
    const std::array<at::Tensor, 2> operands{first, second};
    at::Tensor product;
    {
        const at::NoGradGuard guard;
        product = matmul_forward().run(operands, {}, run_matmul)[0];
    }
    if (is_differentiable) {
        auto node = c10::make_intrusive<BatchedMatmulBackward>();
        node->set_next_edges(torch::autograd::collect_next_edges(first, second));
        if (node->should_compute_output(1)) {
            node->first_ = torch::autograd::SavedVariable(first, /*is_output=*/false);
        }
        if (node->should_compute_output(0)) {
            node->second_ = torch::autograd::SavedVariable(second, /*is_output=*/false);
        }
        torch::autograd::set_history(product, node);
    }
    return product;
}

}  // namespace vescale

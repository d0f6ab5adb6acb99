// `aten::matmul` of two batches of matrices on DTensors with one autograd node: attention without a fused kernel. PyTorch makes
// it of six ops, each with a node.

#pragma once

#include "composite_node.h"

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
inline std::vector<at::Tensor> run_matmul_backward(c10::ArrayRef<at::Tensor> operands, const Wanted& wanted) {
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

class BatchedMatmulBackward final : public CompositeBackward {
  public:
    std::string name() const override { return "BatchedMatmulBackward"; }

  protected:
    Parts& parts() const override { return matmul_backward(); }

    torch::autograd::variable_list run(
        c10::ArrayRef<at::Tensor> operands, const std::vector<at::Tensor>&, const Wanted& wanted) const override {
        return run_matmul_backward(operands, wanted);
    }
};

// Whether PyTorch would make the op of one bmm of the factors as they are.
inline bool is_batched(const at::Tensor& first, const at::Tensor& second) {
    const auto num_dims = first.dim();
    return num_dims > 3 && second.dim() == num_dims && first.size(-1) == second.size(-2) &&
        first.sizes().slice(0, num_dims - 2) == second.sizes().slice(0, num_dims - 2) && first.numel() > 0 &&
        second.numel() > 0 && !first.is_complex() && !second.is_complex();
}

inline at::Tensor matmul(c10::DispatchKeySet keys, const at::Tensor& first, const at::Tensor& second) {
    const std::array<at::Tensor, 2> operands{first, second};
    if (!is_composable(operands) || !is_batched(first, second)) {
        const at::impl::MaybeSetTLSOnEntryGuard guard;
        return at::_ops::matmul::redispatch(below(keys), first, second);
    }
    const bool is_differentiable = torch::autograd::compute_requires_grad(first, second);
    at::Tensor product = run_forward(matmul_forward(), operands, {}, run_matmul)[0];
    if (is_differentiable) {
        auto node = make_node<BatchedMatmulBackward>();
        node->set_next_edges(torch::autograd::collect_next_edges(first, second));
        node->save(node->should_compute_output(1) ? first : at::Tensor());
        node->save(node->should_compute_output(0) ? second : at::Tensor());
        torch::autograd::set_history(product, node);
    }
    return product;
}

}  // namespace vescale

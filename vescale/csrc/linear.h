// `aten::linear` on DTensors with one autograd node. PyTorch makes it of up to five ops, each with a node.

#pragma once

#include "composite_node.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/mm.h>

namespace vescale {

inline Parts& linear_forward() {
    static auto* made = new Parts("linear", 2);
    return *made;
}

inline Parts& linear_backward() {
    static auto* made = new Parts("linear_backward");
    return *made;
}

inline std::int64_t num_rows(const at::Tensor& tensor) {
    return c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
}

// As at::native::linear of a contiguous input. The operands: input, weight, bias.
inline std::vector<at::Tensor> run_linear(c10::ArrayRef<at::Tensor> operands) {
    const auto &input = operands[0], &weight = operands[1], &bias = operands[2];
    const bool is_matrix = input.dim() == 2;
    const auto rows = is_matrix ? input : input.view({num_rows(input), input.size(-1)});
    auto output = bias.defined() ? at::addmm(bias, rows, weight.t()) : at::mm(rows, weight.t());
    if (!is_matrix) {
        auto sizes = input.sizes().vec();
        sizes.back() = output.size(1);
        output = at::_unsafe_view(output, sizes);
    }
    return {std::move(output)};
}

// As the backward of mm and addmm. The operands: gradient, input, weight. The results: the wanted gradients of bias, input and
// weight, computed in the order in which PyTorch does it.
inline std::vector<at::Tensor> run_linear_backward(
    c10::ArrayRef<at::Tensor> operands, const Wanted& wanted, bool has_bias) {
    const auto &gradient = operands[0], &input = operands[1], &weight = operands[2];
    const bool is_matrix = gradient.dim() == 2;
    const auto rows = is_matrix ? gradient : gradient.reshape({num_rows(gradient), gradient.size(-1)});
    std::vector<at::Tensor> found(3);
    const auto of_input = [&] {
        if (wanted[1]) {
            found[1] = at::mm(rows, weight);
            if (!is_matrix) {
                auto sizes = gradient.sizes().vec();
                sizes.back() = found[1].size(1);
                found[1] = found[1].view(sizes);
            }
        }
    };
    const auto of_weight = [&] {
        if (wanted[2]) {
            found[2] = at::mm(rows.t(), is_matrix ? input : input.view({num_rows(input), input.size(-1)}));
        }
    };
    if (has_bias) {
        of_input();
        of_weight();
    } else {
        of_weight();
        of_input();
    }
    if (wanted[0]) {
        found[0] = at::sum_to(rows, at::IntArrayRef{rows.size(1)});
    }
    return found;
}

class LinearBackward final : public CompositeBackward {
  public:
    explicit LinearBackward(bool has_bias) : CompositeBackward({has_bias}), has_bias_(has_bias) {}

    std::string name() const override { return "LinearBackward"; }

  protected:
    Parts& parts() const override { return linear_backward(); }

    torch::autograd::variable_list run(
        c10::ArrayRef<at::Tensor> operands, const std::vector<at::Tensor>&, const Wanted& wanted) const override {
        return run_linear_backward(operands, wanted, has_bias_);
    }

  private:
    bool has_bias_;
};

// Whether PyTorch would make the op of one matrix product of the input's rows, on the DTensors and on their local tensors.
inline bool is_one_product(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
    return input.dim() >= 2 && weight.dim() == 2 && input.is_contiguous() && weight.is_contiguous() &&
        input.size(-1) == weight.size(1) && input.numel() > 0 && weight.size(0) > 1 && weight.size(1) > 1 &&
        !input.is_complex() &&
        (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0))) &&
        local_of(dtensor_of(input)).is_contiguous();
}

inline at::Tensor linear(
    c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& given_bias) {
    const at::Tensor bias = given_bias.value_or(at::Tensor());
    const std::array<at::Tensor, 3> operands{input, weight, bias};
    bool is_ours = is_composable(operands);
    if (is_ours) {
        Gil gil;
        is_ours = is_one_product(input, weight, bias);
    }
    if (!is_ours) {
        const at::impl::MaybeSetTLSOnEntryGuard guard;
        return at::_ops::linear::redispatch(below(keys), input, weight, given_bias);
    }
    NodePtr<LinearBackward> node;
    if (torch::autograd::compute_requires_grad(input, weight, bias)) {
        node = make_node<LinearBackward>(bias.defined());
        // In this order, so that gradients arrive at parameters in PyTorch's order, which determines their places in buckets.
        node->set_next_edges(torch::autograd::collect_next_edges(bias, input, weight));
        // Before the product, as PyTorch does: a block that is computed again for its saved tensors ends here.
        node->save(node->should_compute_output(2) ? input : at::Tensor());
        node->save(node->should_compute_output(1) ? weight : at::Tensor());
    }
    at::Tensor output = run_forward(linear_forward(), operands, {}, run_linear)[0];
    if (node) {
        torch::autograd::set_history(output, node);
    }
    return output;
}

}  // namespace vescale

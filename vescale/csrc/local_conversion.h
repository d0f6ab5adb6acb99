// Conversions of local tensors: leave_local, convert and enter_local in one, with one node and without DTensors.
//
// For boundaries of modules in static mode, whose placements are known. What does not go this way answers None, and Python
// makes the three calls.

#pragma once

#include "local_regions.h"

namespace vescale {

// Holds spec and gradient's placements of the DTensor that is made of the local tensor; stages of the gradient and the
// requester; spec and gradient's placements of the DTensor that becomes local.
class ConvertLocalBackward final : public PythonNode {
  public:
    using PythonNode::PythonNode;

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        if (!gradients[0].defined()) {
            return {at::Tensor()};
        }
        const Gil gil;
        at::Tensor local = gradients[0];
        if (at::GradMode::is_enabled() || !is_plain(local) || dtensor_class().type == nullptr) {
            return {through_dtensors(global_gradient(local, held(4), held(5)), held(2))};
        }
        const Running running;
        const Spec* spec = gradient_spec(local, held(4), held(5));
        if (spec == nullptr) {
            return {through_dtensors(global_gradient(local, held(4), held(5)), held(2))};
        }
        const py::tuple stages(held(2));
        for (const auto i : c10::irange(stages.size())) {
            const auto move = move_between(spec, PyTuple_GET_ITEM(stages.ptr(), i));
            at::Tensor next = moved(local, *move);
            if (!next.defined()) {  // Python moves it
                const auto rest = owned(PyTuple_GetSlice(stages.ptr(), i, PyTuple_GET_SIZE(stages.ptr())));
                return {through_dtensors(wrap(std::move(local), *spec), rest)};
            }
            if (move->program) {
                spec = move->target;
                local = std::move(next);
            }
        }
        const auto last = move_between(spec, held(1).ptr());
        if (last->target != nullptr && !last->program) {
            return {std::move(local)};
        }
        return {through_dtensors(wrap(std::move(local), *spec), py::tuple())};
    }

    std::string name() const override { return "ConvertLocalBackward"; }

  private:
    at::Tensor through_dtensors(at::Tensor gradient, const py::object& stages) const {
        gradient = through_stages(std::move(gradient), stages, held(3));
        return left_gradient(gradient, held(0), held(1), held(3));
    }
};

// A boundary. `factors`: global size by local size of each dim, 0 where ranks share it unevenly, whose sizes (global, local)
// `sizes` has. `grad`, `grad_after`: placements of the gradients of both tensors, or None for those of the tensor. `accept`
// is called with the spec of the result, the first time, and raises where it is another one than expected.
class LocalConversion {
  public:
    LocalConversion(
        py::object mesh, const py::object& placements, const py::tuple& factors, const py::tuple& sizes,
        const py::object& grad, py::object target, py::object stages, py::object requester, const py::object& grad_after,
        py::object accept)
        : mesh_(std::move(mesh)),
          placements_(kept(placements)),
          grad_(grad.is_none() ? grad : kept(grad)),
          target_(std::move(target)),
          stages_(std::move(stages)),
          requester_(std::move(requester)),
          grad_after_(grad_after.is_none() ? grad_after : kept(grad_after)),
          accept_(std::move(accept)) {
        factors_ = sizes_of(factors);
        for (const auto& size : sizes) {
            sizes_.push_back(size.cast<std::pair<std::int64_t, std::int64_t>>());
        }
        for (const auto i : c10::irange(factors_.size())) {
            TORCH_CHECK_VALUE(factors_[i] != 0 || i < sizes_.size(), "no sizes of dim ", i);
        }
    }

    // None where Python has to.
    py::object run(const at::Tensor& local) {
        const auto global = is_unusual(local) || !local.is_contiguous() ? std::nullopt : global_sizes(local);
        if (!global) {
            return py::none();
        }
        const Running running;
        const auto crossing =
            find_crossing(Way::kLeave, local, {mesh_, placements_}, *global, [&](const py::object& given) {
                py::tuple shape(global->size());
                for (const auto i : c10::irange(global->size())) {
                    shape[i] = (*global)[i];
                }
                return local_regions().leaving(given, mesh_, placements_, shape);
            });
        const Spec* spec = crossing->spec;
        if (spec == nullptr) {
            return py::none();
        }
        const auto move = move_between(spec, target_.ptr());
        at::Tensor result = moved(local, *move);
        if (!result.defined()) {
            return py::none();
        }
        const Spec* after = move->program ? move->target : spec;
        if (after->object.ptr() != accepted_.ptr()) {
            accept_(after->object);
            accepted_ = after->object;
        }
        if (!move->program) {
            result = local.detach();
        }
        if (is_linked(local)) {
            auto node = make_node<ConvertLocalBackward>(std::vector<py::object>{
                spec->object, grad_.is_none() ? crossing->grad_placements : grad_, stages_, requester_, after->object,
                grad_after_});
            node->set_next_edges(torch::autograd::collect_next_edges(local));
            torch::autograd::set_history(result, node);
        }
        return to_object(result);
    }

  private:
    std::optional<Sizes> global_sizes(const at::Tensor& local) const {
        if (local.dim() != static_cast<std::int64_t>(factors_.size())) {
            return std::nullopt;
        }
        Sizes global;
        for (const auto i : c10::irange(factors_.size())) {
            if (factors_[i] == 0 && local.size(i) != sizes_[i].second) {
                return std::nullopt;
            }
            global.push_back(factors_[i] == 0 ? sizes_[i].first : local.size(i) * factors_[i]);
        }
        return global;
    }

    py::object mesh_, placements_, grad_, target_, stages_, requester_, grad_after_, accept_, accepted_;
    Sizes factors_;
    std::vector<std::pair<std::int64_t, std::int64_t>> sizes_;
};

inline py::object convert_local(LocalConversion& conversion, const at::Tensor& local) {
    return conversion.run(local);
}

}  // namespace vescale

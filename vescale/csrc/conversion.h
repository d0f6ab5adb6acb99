// Conversions of DTensors to other placements, with an autograd node for the way back.
//
// Which collective a change of placements takes is asked once for a spec and a target, and kept. What C++ does by itself:
// nothing (the placements are equal), and one all-reduce. All other changes, and all of them while somebody observes
// collectives, run in Python.

#pragma once

#include "specs.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <string>

namespace vescale {

// How a tensor gets from one spec to another.
struct Move {
    const Spec* target = nullptr;  // null: Python runs it
    c10::intrusive_ptr<c10d::ProcessGroup> group;  // of an all-reduce; null: nothing moves
    c10d::ReduceOp op;
    std::int64_t divisor = 1;
};

// By the address of the source's spec and of the target, a tuple that is kept.
using MoveTable = std::map<std::pair<const Spec*, PyObject*>, std::pair<py::object, Move>>;

struct Conversions {
    py::object plan;  // (spec, target) -> None, (spec of the result,), or (spec of the result, group, op, divisor)
    py::object move;  // (DTensor, target, requester) -> DTensor, outside of autograd
    py::object differentiate;  // (DTensor, stages, requester) -> DTensor, with autograd
    py::object is_observed;  // () -> whether somebody observes collectives
    MoveTable moves;
    std::uint64_t epoch = 0;
};

inline Conversions& conversions() {
    static auto* made = new Conversions;
    return *made;
}

inline Move move_between(const Spec* source, PyObject* target) {
    auto& our = conversions();
    if (our.epoch != self().epoch || our.moves.size() >= self().max_entries) {
        our.moves.clear();
        our.epoch = self().epoch;
    }
    const auto found = our.moves.find({source, target});
    if (found != our.moves.end()) {
        return found->second.second;
    }
    Move move;
    const auto epoch = self().epoch;
    const py::object plan = our.plan(source->object, py::handle(target));
    if (!plan.is_none()) {
        const auto parts = plan.cast<py::tuple>();
        move.target = add_spec(parts[0].ptr());
        if (parts.size() > 1) {
            move.group = parts[1].cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
            move.op = parts[2].cast<c10d::ReduceOp::RedOpType>();
            move.divisor = parts[3].cast<std::int64_t>();
        }
    }
    if (epoch == self().epoch) {  // otherwise the tables were cleared meanwhile, and `source` has gone
        our.moves.emplace(std::make_pair(source, target), std::make_pair(py::reinterpret_borrow<py::object>(target), move));
    }
    return move;
}

// The tensor with other placements, outside of autograd. The lock is held. Where nothing moves, `is_fresh` asks for a new
// DTensor with the same local tensor.
inline at::Tensor moved(
    const at::Tensor& tensor, PyObject* dtensor, const Spec* spec, PyObject* target, PyObject* requester, bool is_fresh) {
    const Running running;  // specs stay while the lock is given up
    const Move move = move_between(spec, target);
    const at::Tensor local = local_of(dtensor);
    const bool is_plain = !local.key_set().has(c10::DispatchKey::Python) && !local.is_conj() && !local.is_neg();
    bool is_python = move.target == nullptr || !is_plain;
    if (!is_python && move.group) {
        is_python = conversions().is_observed().cast<bool>();
    }
    if (is_python) {
        const py::object made = conversions().move(py::handle(dtensor), py::handle(target), py::handle(requester));
        return THPVariable_Unpack(made.ptr());
    }
    if (!move.group) {
        return is_fresh ? wrap(local, *move.target) : tensor;
    }
    at::Tensor reduced;
    {
        Unlocked unlocked(true);
        at::AutoDispatchBelowADInplaceOrView guard;
        reduced = local.clone(at::MemoryFormat::Contiguous);
        std::vector<at::Tensor> tensors{reduced};
        c10d::AllreduceOptions options;
        options.reduceOp = move.op;
        move.group->allreduce(tensors, options)->wait();
        if (move.divisor > 1) {
            reduced.div_(move.divisor);
        }
    }
    return wrap(std::move(reduced), *move.target);
}

// Brings the gradient through the stages, one after the other.
class ConvertBackward final : public torch::autograd::Node {
  public:
    ConvertBackward(py::object stages, py::object requester) : stages_(std::move(stages)), requester_(std::move(requester)) {}

    ~ConvertBackward() override {
        if (!Py_IsInitialized()) {  // the interpreter, and what it owned, has gone
            stages_.release();
            requester_.release();
            return;
        }
        Gil gil;
        stages_ = requester_ = py::object();
    }

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        at::Tensor gradient = std::move(gradients[0]);
        if (!gradient.defined()) {
            return {at::Tensor()};
        }
        Gil gil;
        const auto name = owned(PyUnicode_FromFormat("%U: gradient", requester_.ptr()));
        const auto in_python = [&gradient](const auto& function, const auto&... arguments) -> at::Tensor {
            const auto wrapped = owned(THPVariable_Wrap(gradient));
            const py::object made = function(wrapped, arguments...);
            return THPVariable_Unpack(made.ptr());
        };
        if (at::GradMode::is_enabled()) {  // derivatives of gradients have nodes of their own
            return {in_python(conversions().differentiate, stages_, name)};
        }
        for (const auto& stage : py::reinterpret_borrow<py::tuple>(stages_)) {
            PyObject* dtensor = dtensor_of(gradient);
            const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
            gradient = spec == nullptr
                ? in_python(conversions().move, stage, name)
                : moved(gradient, dtensor, spec, stage.ptr(), name.ptr(), /*is_fresh=*/false);
        }
        return {std::move(gradient)};
    }

    std::string name() const override { return "ConvertBackward"; }

  private:
    py::object stages_;  // placements of each stage; None on an axis keeps what is there
    py::object requester_;
};

// A DTensor with the placements `target`, linked in autograd; None where Python has to do it.
inline py::object convert(const at::Tensor& tensor, py::handle target, py::handle stages, py::handle requester) {
    if (dtensor_class().type == nullptr || !is_active.load(std::memory_order_relaxed) ||
        c10::impl::TorchDispatchModeTLS::any_modes_set() ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
        return py::none();
    }
    PyObject* dtensor = dtensor_of(tensor);
    const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
    if (spec == nullptr || torch::autograd::isFwGradDefined(tensor)) {
        return py::none();
    }
    at::Tensor result = moved(tensor, dtensor, spec, target.ptr(), requester.ptr(), /*is_fresh=*/true);
    if (at::GradMode::is_enabled() && tensor.requires_grad()) {
        auto node = c10::make_intrusive<ConvertBackward>(
            py::reinterpret_borrow<py::object>(stages), py::reinterpret_borrow<py::object>(requester));
        node->set_next_edges(torch::autograd::collect_next_edges(tensor));
        torch::autograd::set_history(result, node);
    }
    return owned(THPVariable_Wrap(result));
}

inline void set_conversions(py::object plan, py::object move, py::object differentiate, py::object is_observed) {
    auto& our = conversions();
    our.moves.clear();
    our.plan = std::move(plan);
    our.move = std::move(move);
    our.differentiate = std::move(differentiate);
    our.is_observed = std::move(is_observed);
}

}  // namespace vescale

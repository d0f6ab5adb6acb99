// Conversions of DTensors to other placements, with an autograd node for the way back.
//
// Which collective a change of placements takes is asked once for a spec and a target, and kept. What C++ does by itself:
// nothing (the placements are equal), and one all-reduce. All other changes, and all of them while somebody observes
// collectives, run in Python.

#pragma once

#include "dtensor.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

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
using MoveTable = std::map<std::pair<const Spec*, PyObject*>, std::pair<PyRef, Move>>;

struct Conversions {
    PyRef plan;  // (spec, target) -> None, (spec of the result,), or (spec of the result, group, op, divisor)
    PyRef move;  // (DTensor, target, requester) -> DTensor, outside of autograd
    PyRef differentiate;  // (DTensor, stages, requester) -> DTensor, with autograd
    PyRef is_observed;  // () -> whether somebody observes collectives
    MoveTable moves;
    std::uint64_t epoch = 0;
};

inline Conversions& conversions() {
    static auto* made = new Conversions;
    return *made;
}

inline PyRef checked(PyObject* made) {
    if (made == nullptr) {
        throw python_error();
    }
    return PyRef::steal(made);
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
    PyRef plan = checked(PyObject_CallFunctionObjArgs(our.plan.get(), source->object.get(), target, nullptr));
    if (plan.get() != Py_None) {
        move.target = add_spec(PyTuple_GET_ITEM(plan.get(), 0));
        if (PyTuple_GET_SIZE(plan.get()) > 1) {
            move.group = py::handle(PyTuple_GET_ITEM(plan.get(), 1)).cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
            move.op = py::handle(PyTuple_GET_ITEM(plan.get(), 2)).cast<c10d::ReduceOp::RedOpType>();
            move.divisor = PyLong_AsLongLong(PyTuple_GET_ITEM(plan.get(), 3));
        }
    }
    if (epoch == self().epoch) {  // otherwise the tables were cleared meanwhile, and `source` has gone
        our.moves.emplace(std::make_pair(source, target), std::make_pair(PyRef::borrow(target), move));
    }
    return move;
}

// The tensor with other placements, outside of autograd. The lock is held. Where nothing moves, `is_fresh` asks for a new
// DTensor with the same local tensor.
inline at::Tensor moved(
    const at::Tensor& tensor, PyObject* dtensor, const Spec* spec, PyObject* target, PyObject* requester, bool is_fresh) {
    const Move move = move_between(spec, target);
    const at::Tensor local = local_of(dtensor);
    const bool is_plain = !local.key_set().has(c10::DispatchKey::Python) && !local.is_conj() && !local.is_neg();
    bool is_python = move.target == nullptr || !is_plain;
    if (!is_python && move.group) {
        PyRef answer = checked(PyObject_CallNoArgs(conversions().is_observed.get()));
        is_python = answer.get() == Py_True;
    }
    if (is_python) {
        PyRef made = checked(
            PyObject_CallFunctionObjArgs(conversions().move.get(), dtensor, target, requester, nullptr));
        return THPVariable_Unpack(made.get());
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
    ConvertBackward(PyRef stages, PyRef requester) : stages_(std::move(stages)), requester_(std::move(requester)) {}

    ~ConvertBackward() override {
        if (!Py_IsInitialized()) {  // the interpreter, and what it owned, has gone
            stages_.release();
            requester_.release();
            return;
        }
        Gil gil;
        stages_ = requester_ = PyRef();
    }

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        at::Tensor gradient = std::move(gradients[0]);
        if (!gradient.defined()) {
            return {at::Tensor()};
        }
        Gil gil;
        PyRef name = checked(PyUnicode_FromFormat("%U: gradient", requester_.get()));
        if (at::GradMode::is_enabled()) {  // derivatives of gradients have nodes of their own
            PyRef wrapped = checked(THPVariable_Wrap(gradient));
            PyRef made = checked(PyObject_CallFunctionObjArgs(
                conversions().differentiate.get(), wrapped.get(), stages_.get(), name.get(), nullptr));
            return {THPVariable_Unpack(made.get())};
        }
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(stages_.get()); ++i) {
            PyObject* stage = PyTuple_GET_ITEM(stages_.get(), i);
            PyObject* dtensor = dtensor_of(gradient);
            const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
            if (spec == nullptr) {
                PyRef wrapped = checked(THPVariable_Wrap(gradient));
                PyRef made = checked(PyObject_CallFunctionObjArgs(
                    conversions().move.get(), wrapped.get(), stage, name.get(), nullptr));
                gradient = THPVariable_Unpack(made.get());
            } else {
                gradient = moved(gradient, dtensor, spec, stage, name.get(), /*is_fresh=*/false);
            }
        }
        return {std::move(gradient)};
    }

    std::string name() const override { return "ConvertBackward"; }

  private:
    PyRef stages_;  // placements of each stage; None on an axis keeps what is there
    PyRef requester_;
};

// A DTensor with the placements `target`, linked in autograd; None where Python has to do it.
inline py::object convert(const at::Tensor& tensor, py::handle target, py::handle stages, py::handle requester) {
    if (self().dtensor == nullptr || !is_active.load(std::memory_order_relaxed) ||
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
        auto node = c10::make_intrusive<ConvertBackward>(PyRef::borrow(stages.ptr()), PyRef::borrow(requester.ptr()));
        node->set_next_edges(torch::autograd::collect_next_edges(tensor));
        torch::autograd::set_history(result, node);
    }
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(result));
}

inline void set_conversions(py::object plan, py::object move, py::object differentiate, py::object is_observed) {
    auto& our = conversions();
    our.moves.clear();
    our.plan = PyRef::steal(plan.release().ptr());
    our.move = PyRef::steal(move.release().ptr());
    our.differentiate = PyRef::steal(differentiate.release().ptr());
    our.is_observed = PyRef::steal(is_observed.release().ptr());
}

}  // namespace vescale

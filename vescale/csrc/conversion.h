// Conversions of DTensors to other placements, with an autograd node for the way back.
//
// What a change of placements takes is asked once for a spec and a target, and kept: nothing, or a program (moves.h). Changes
// without a program, and all that communicate while somebody observes collectives, run in Python.

#pragma once

#include "boundary_functions.h"
#include "links.h"
#include "moves.h"
#include "python_node.h"
#include "specs.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <map>
#include <string>
#include <unordered_set>

namespace vescale {

// How a tensor gets from one spec to another.
struct Move {
    py::object placements;  // the key of the table
    const Spec* target = nullptr;  // null: Python runs it
    std::optional<Program> program;  // none: nothing moves
};

// By the address of the source's spec and of the target, a tuple that is kept.
using MoveTable = std::map<std::pair<const Spec*, PyObject*>, std::shared_ptr<const Move>>;

struct Conversions {
    py::object plan;  // (spec, target) -> None, (spec of the result, None), or (spec of the result, NativeMove)
    py::object move;  // (DTensor, target, requester) -> DTensor, outside of autograd
    py::object differentiate;  // (DTensor, stages, requester) -> DTensor, with autograd
    py::tuple listeners;  // lists: somebody observes collectives while one of them has members
    MoveTable moves;
    py::dict tuples;  // of equal tuples of placements, the one that is kept
    std::unordered_set<PyObject*> kept;  // these: hashing placements is Python's
    std::uint64_t epoch = 0;
};

inline Conversions& conversions() {
    static auto* made = new Conversions;
    return *made;
}

inline bool are_collectives_observed() {
    const auto& lists = conversions().listeners;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lists.ptr()); ++i) {
        if (PyList_GET_SIZE(PyTuple_GET_ITEM(lists.ptr(), i)) > 0) {
            return true;
        }
    }
    return false;
}

// Forgets what rests on tables that have been cleared.
inline Conversions& fresh_conversions() {
    auto& our = conversions();
    if (our.epoch != self().epoch || our.moves.size() >= self().max_entries || our.tuples.size() >= self().max_entries) {
        const auto moves = std::exchange(our.moves, {});
        const auto tuples = std::exchange(our.tuples, py::dict());
        our.kept.clear();
        our.epoch = self().epoch;
    }
    return our;
}

// The tuple of placements that stands for all equal ones.
inline py::object kept(py::handle placements) {
    auto& our = fresh_conversions();
    if (our.kept.count(placements.ptr()) != 0) {
        return py::reinterpret_borrow<py::object>(placements);
    }
    const auto given = owned(PySequence_Tuple(placements.ptr()));  // a tuple itself, if it is one
    const py::dict tuples = our.tuples;  // comparing may run Python, and clear the tables
    PyObject* found = PyDict_SetDefault(tuples.ptr(), given.ptr(), given.ptr());
    if (found == nullptr) {
        throw python_error();
    }
    if (our.tuples.is(tuples)) {
        our.kept.insert(found);
    }
    return py::reinterpret_borrow<py::object>(found);
}

// The lock is held. `target` has None for axes that keep their placement.
inline std::shared_ptr<const Move> move_between(const Spec* source, PyObject* target) {
    auto& our = fresh_conversions();
    const auto found = our.moves.find({source, target});
    if (found != our.moves.end()) {
        return found->second;
    }
    auto move = std::make_shared<Move>();
    move->placements = py::reinterpret_borrow<py::object>(target);
    const auto epoch = self().epoch;
    const py::object plan = our.plan(source->object, py::handle(target));
    if (!plan.is_none()) {
        const auto parts = plan.cast<py::tuple>();
        move->target = add_spec(parts[0].ptr());
        if (!parts[1].is_none()) {
            move->program.emplace(parts[1].cast<py::tuple>());
        }
    }
    // Of a table that was cleared, now or while the caller was communicating, `source` goes with the call that uses it; another
    // spec may get its address.
    const auto known = self().specs.find(source->object.ptr());
    if (epoch == self().epoch && known != self().specs.end() && known->second.get() == source) {
        our.moves.emplace(std::make_pair(source, target), move);
    }
    return move;
}

// Whether a tensor is what its memory holds.
inline bool is_plain(const at::Tensor& tensor) {
    return !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.is_conj() && !tensor.is_neg() &&
        tensor.layout() == at::kStrided;
}

// The local tensor where the move brings it, undefined where Python has to. The lock is held.
inline at::Tensor moved(const at::Tensor& local, const Move& move) {
    if (move.target == nullptr || !is_plain(local)) {
        return {};
    }
    if (!move.program) {
        return local;
    }
    if (!move.program->is_for(local) || (move.program->communicates() && are_collectives_observed())) {
        return {};
    }
    return move.program->run(local);
}

// A gradient brought through the stages, one after the other: placements; None on an axis keeps what is there. The lock is
// held.
inline at::Tensor through_stages(at::Tensor gradient, const py::object& stages, const py::object& requester) {
    const auto& our = conversions();
    if (at::GradMode::is_enabled()) {  // derivatives of gradients have nodes of their own
        return to_tensor(our.differentiate(to_object(gradient), stages, gradient_of(requester)));
    }
    for (const auto& stage : py::tuple(stages)) {
        PyObject* dtensor = dtensor_class().type == nullptr ? nullptr : dtensor_of(gradient);
        const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
        if (spec != nullptr) {
            const Running running;  // specs stay while the lock is given up
            const auto move = move_between(spec, stage.ptr());
            at::Tensor local = moved(local_of(dtensor), *move);
            if (local.defined()) {
                if (move->program) {
                    gradient = wrap(std::move(local), *move->target);
                }
                continue;
            }
        }
        gradient = to_tensor(our.move(to_object(gradient), stage, gradient_of(requester)));
    }
    return gradient;
}

// Brings the gradient through stages. Holds the stages and the requester.
class ConvertBackward final : public PythonNode {
  public:
    using PythonNode::PythonNode;

    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
        if (!gradients[0].defined()) {
            return {at::Tensor()};
        }
        const Gil gil;
        return {through_stages(std::move(gradients[0]), held(0), held(1))};
    }

    std::string name() const override { return "ConvertBackward"; }
};

// Whether somebody sees what runs, so that Python has to run it.
inline bool is_seen() {
    return dtensor_class().type == nullptr || !is_active.load(std::memory_order_relaxed) ||
        c10::impl::TorchDispatchModeTLS::any_modes_set() ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// The way back of a conversion, behind `tensor` and in front of `result`.
inline void set_conversion(const at::Tensor& result, const at::Tensor& tensor, const py::object& stages, const py::object& requester) {
    if (at::GradMode::is_enabled() && tensor.requires_grad()) {
        auto node = make_node<ConvertBackward>(std::vector<py::object>{stages, requester});
        node->set_next_edges(torch::autograd::collect_next_edges(tensor));
        torch::autograd::set_history(result, node);
    }
}

// A DTensor around the same local tensor, which counts as a view: neither linked in autograd nor sharing a version yet.
inline at::Tensor alias_of(const at::Tensor& tensor, PyObject* dtensor) {
    at::Tensor made =
        wrap(local_of(dtensor), slot(dtensor, dtensor_class().spec_slot), tensor.sizes(), tensor.strides());
    made.unsafeGetTensorImpl()->set_storage_keep_dtype(tensor.storage());
    made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    return made;
}

// How autograd makes a boundary where nothing moves anew, after a write to one side: with the same way back.
class Boundary final : public torch::autograd::ViewFunc {
  public:
    struct Held {
        py::object stages, requester;

        ~Held() {
            if (!Py_IsInitialized()) {
                stages.release();
                requester.release();
                return;
            }
            Gil gil;
            stages = py::object();
            requester = py::object();
        }
    };

    explicit Boundary(std::shared_ptr<Held> held) : held_(std::move(held)) {}

    at::Tensor operator()(const at::Tensor& base) const override {
        Gil gil;
        PyObject* dtensor = dtensor_class().type == nullptr ? nullptr : dtensor_of(base);
        if (dtensor == nullptr) {
            return base.view_as(base);
        }
        at::Tensor made = alias_of(base, dtensor);
        set_conversion(made, base, held_->stages, held_->requester);
        return made;
    }

    std::unique_ptr<ViewFunc> clone_and_set(
        std::optional<std::vector<c10::SymInt>> = std::nullopt,
        std::optional<std::vector<at::Tensor>> = std::nullopt) const override {
        return std::make_unique<Boundary>(held_);
    }

  private:
    std::shared_ptr<Held> held_;
};

// `copy`, which was made of `tensor` at a boundary: the two are a `Group`.
inline void link_copy(const at::Tensor& tensor, const at::Tensor& copy, const py::object& outdated) {
    PyObject *from = dtensor_of(tensor), *to = dtensor_of(copy);
    if (from != nullptr && to != nullptr && !tensor.is_inference()) {
        share_version(copy, tensor);
        add_to_group(local_of(from), local_of(to), outdated);
    }
}

// Whether a boundary leaves a tensor where it is.
inline bool passes(const Move& move, const at::Tensor& tensor) {
    return move.target != nullptr && !move.program && !tensor.is_inference();
}

// The tensor behind a boundary where nothing moves.
inline py::object passed_on(
    const at::Tensor& tensor, PyObject* dtensor, const py::object& stages, const py::object& requester) {
    if (!at::GradMode::is_enabled() || !tensor.requires_grad()) {
        return py::reinterpret_borrow<py::object>(dtensor);
    }
    auto held = std::make_shared<Boundary::Held>(Boundary::Held{stages, requester});
    at::Tensor view = torch::autograd::as_view(
        tensor, alias_of(tensor, dtensor), /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/true,
        std::make_unique<Boundary>(std::move(held)));
    set_conversion(view, tensor, stages, requester);
    return to_object(view);
}

// A DTensor with the placements `target`, linked in autograd; None where Python has to do it. `outdated`: None makes a tensor of
// its own. Otherwise one device would pass the tensor on: where nothing moves, the result is a view of it, or the tensor itself
// where it needs no gradient; where data move, the two are a `Group`.
inline py::object convert(
    const at::Tensor& tensor, py::handle target, py::handle stages, py::handle requester, py::handle outdated) {
    if (is_seen()) {
        return py::none();
    }
    PyObject* dtensor = dtensor_of(tensor);
    const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
    if (spec == nullptr || torch::autograd::isFwGradDefined(tensor)) {
        return py::none();
    }
    require_current(local_of(dtensor));
    const Running running;  // specs stay while the lock is given up
    const auto move = move_between(spec, target.ptr());
    const auto held_stages = py::reinterpret_borrow<py::object>(stages);
    const auto held_requester = py::reinterpret_borrow<py::object>(requester);
    if (!outdated.is_none() && passes(*move, tensor)) {
        return passed_on(tensor, dtensor, held_stages, held_requester);
    }
    at::Tensor result = moved(local_of(dtensor), *move);
    result = result.defined() ? wrap(std::move(result), *move->target)
                              : to_tensor(conversions().move(py::handle(dtensor), target, requester));
    set_conversion(result, tensor, held_stages, held_requester);
    if (!outdated.is_none()) {
        link_copy(tensor, result, py::reinterpret_borrow<py::object>(outdated));
    }
    return to_object(result);
}

// `convert` with `outdated` where nothing moves; None in all other cases.
inline py::object pass_boundary(const at::Tensor& tensor, py::handle target, py::handle stages, py::handle requester) {
    PyObject* dtensor = is_seen() ? nullptr : dtensor_of(tensor);
    const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
    if (spec == nullptr || torch::autograd::isFwGradDefined(tensor)) {
        return py::none();
    }
    require_current(local_of(dtensor));
    const Running running;
    const auto move = move_between(spec, target.ptr());
    if (!passes(*move, tensor)) {
        return py::none();
    }
    return passed_on(tensor, dtensor, py::reinterpret_borrow<py::object>(stages), py::reinterpret_borrow<py::object>(requester));
}

// For the library of module hooks.
inline const BoundaryFunctions* own_boundary_functions() {
    static const auto or_null = [](py::object made) { return made.is_none() ? nullptr : made.release().ptr(); };
    static const BoundaryFunctions functions{
        [](PyObject* x, PyObject* target, PyObject* stages, PyObject* requester) {
            return or_null(pass_boundary(THPVariable_Unpack(x), target, stages, requester));
        },
        [](PyObject* x, PyObject* target, PyObject* stages, PyObject* requester, PyObject* outdated) {
            return or_null(convert(THPVariable_Unpack(x), target, stages, requester, outdated));
        },
        [](PyObject* x) {
            if (PyObject* dtensor = dtensor_of(THPVariable_Unpack(x))) {
                spec_of(dtensor);
            }
        }};
    return &functions;
}

// A new DTensor with the placements `target`, outside of autograd; None where Python has to make it.
inline py::object convert_values(const at::Tensor& tensor, py::handle target) {
    PyObject* dtensor = is_seen() ? nullptr : dtensor_of(tensor);
    const Spec* spec = dtensor == nullptr ? nullptr : spec_of(dtensor);
    if (spec == nullptr || torch::autograd::isFwGradDefined(tensor)) {
        return py::none();
    }
    require_current(local_of(dtensor));
    const Running running;
    const auto move = move_between(spec, kept(target).ptr());
    at::Tensor local = moved(local_of(dtensor), *move);
    return local.defined() ? to_object(wrap(std::move(local), *move->target)) : py::none();
}

inline void set_conversions(py::object plan, py::object move, py::object differentiate, py::tuple listeners) {
    auto& our = conversions();
    for (const auto list : listeners) {
        TORCH_CHECK_TYPE(PyList_Check(list.ptr()), "expected lists");
    }
    our.moves.clear();
    our.plan = std::move(plan);
    our.move = std::move(move);
    our.differentiate = std::move(differentiate);
    our.listeners = std::move(listeners);
}

}  // namespace vescale

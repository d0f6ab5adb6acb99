// Ops on DTensors without Python: kernels at the Python dispatch key, in front of PyTorch's own path.
//
// A call is looked up by the specs of its DTensors and by its other arguments. If the op is known to run on the local
// tensors as they are, it does, and its results become DTensors. On the first call with a key, Python decides whether that
// is so. Everything else takes PyTorch's path, unchanged: other tensor subclasses, modes, traced programs, ops that move
// operands.
//
// Tables are read and written with the interpreter's lock held, which is also their lock. The library is for one version of
// torch, which its file name contains.

#include "batched_matmul.h"
#include "conversion.h"
#include "function_filter.h"
#include "function_passes.h"
#include "held_tensors.h"
#include "kernel.h"
#include "layer_norm.h"
#include "linear.h"
#include "links.h"
#include "local_conversion.h"
#include "local_regions.h"
#include "module_entries.h"
#include "plain_inputs.h"
#include "plain_labels.h"
#include "rms_norm.h"
#include "thread_settings.h"

#include <algorithm>
#include <string>

namespace vescale {
namespace {

Registration<Kernel>& registered() {
    static auto* made = new Registration<Kernel>;
    return *made;
}

// Kernels of composites, above autograd: at a key that only tensor subclasses have.
std::vector<c10::RegistrationHandleRAII>& composites() {
    static auto* made = new std::vector<c10::RegistrationHandleRAII>;
    return *made;
}

// Called with the lock held. Tables rest on rules that have changed, or have become too large.
void clear_tables() {
    auto& our = self();
    our.epoch += 1;
    our.num_entries = 0;
    for (auto* kernel : registered().kernels) {
        kernel->clear();
    }
    for (auto* parts : all_parts()) {
        parts->clear();
    }
    retire(our.specs);
}

bool is_for_dtensors(const c10::OperatorHandle& op) {
    if (op.operator_name().name.rfind("aten::", 0) != 0 || !op.hasSchema()) {
        return false;
    }
    if (op.hasKernelForDispatchKey(DispatchKey::Python) ||
        op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
        return false;
    }
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {  // one device's random numbers need more than the local tensors
        return false;
    }
    const auto& arguments = op.schema().arguments();
    return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
        return argument.type()->str().find("Tensor") != std::string::npos;
    });
}

std::vector<std::size_t> written_arguments(const c10::FunctionSchema& schema) {
    std::vector<std::size_t> found;
    for (const auto i : c10::irange(schema.arguments().size())) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite()) {
            found.push_back(i);
        }
    }
    return found;
}

template <class Function>
void add_composite(const char* op, Function* function) {
    composites().push_back(c10::Dispatcher::singleton().registerImpl(
        {op, ""}, DispatchKey::PythonTLSSnapshot, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function),
        std::nullopt, nullptr, "vescale"));
}

void install(
    const py::object& dtensor, const py::object& spec, const py::object& local, py::object intern, py::object decide,
    py::object static_arguments, py::object stock_placements, py::object forget, std::size_t max_entries) {
    auto& our = self();
    TORCH_CHECK(registered().handles.empty(), "the dispatcher is installed already");
    set_dtensor_class(dtensor, spec, local);
    our.intern = std::move(intern);
    our.decide = std::move(decide);
    our.static_arguments = std::move(static_arguments);
    our.stock_placements = std::move(stock_placements);
    our.forget = std::move(forget);
    our.max_entries = max_entries;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findOp(name);
        if (op.has_value() && is_for_dtensors(*op)) {
            const auto& returns = op->schema().returns();
            const bool views = !returns.empty() && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite();
            auto kernel = std::make_unique<Kernel>(c10::toString(name), written_arguments(op->schema()), views);
            registered().add(name, DispatchKey::Python, std::move(kernel));
        }
    }
    for (auto* parts : {&linear_forward, &linear_backward, &matmul_forward, &matmul_backward, &layer_norm_forward,
                        &layer_norm_backward, &rms_norm_forward, &rms_norm_backward}) {
        parts();  // enters the list of all of them, which is read with the lock held; calls begin without it
    }
    add_composite("aten::linear", &linear);
    add_composite("aten::matmul", &matmul);
    add_composite("aten::layer_norm", &layer_norm);
    add_composite("aten::rms_norm", &rms_norm);
    add_composite("aten::cross_entropy_loss", &cross_entropy_loss);
    add_composite("aten::nll_loss_nd", &nll_loss_nd);
    add_composite("aten::broadcast_tensors", &broadcast_tensors);
}

bool is_installed() {
    return !registered().handles.empty();
}

bool set_active(bool wanted) {
    return is_active.exchange(wanted);
}

// For benchmarks: PyTorch takes composites apart again.
void remove_composites() {
    composites().clear();
}

void uninstall() {
    clear_tables();
    dtensor_class().type = nullptr;
    registered().remove_all();
    remove_composites();
}

py::dict counts() {
    py::dict all;
    for (const auto* kernel : registered().kernels) {
        const auto& counts = kernel->counts();
        py::dict stock;
        for (const auto& [reason, calls] : counts.stock) {
            stock[reason] = py::make_tuple(calls.first, calls.second);
        }
        if (counts.hits != 0 || counts.misses != 0 || !counts.stock.empty()) {
            all[kernel->name().c_str()] = py::make_tuple(counts.hits, counts.misses, counts.seconds_of_misses, stock);
        }
    }
    for (auto* parts : all_parts()) {
        const auto& counts = parts->counts();
        if (counts.hits != 0 || counts.misses != 0) {
            all[parts->name().c_str()] = py::make_tuple(counts.hits, counts.misses, counts.seconds_of_misses, py::dict());
        }
    }
    return all;
}

void reset_counts() {
    for (auto* kernel : registered().kernels) {
        kernel->reset_counts();
    }
    for (auto* parts : all_parts()) {
        parts->counts() = {};
    }
}

// Whether this thread has run an op on DTensors by PyTorch's path since the last call.
bool take_other() {
    return std::exchange(WatchCalls::has_other(), false);
}

// `local`: of a DTensor, of which `copy` is to be viewed in its place.
bool link_view(const at::Tensor& local, const at::Tensor& copy, py::object update) {
    add_view(local, copy, std::move(update));
    return true;
}

// Before Python reads a DTensor's local tensor.
void require_current_dtensor(const at::Tensor& tensor) {
    if (all_links().empty() || dtensor_class().type == nullptr) {
        return;
    }
    if (PyObject* dtensor = dtensor_of(tensor)) {
        require_current(local_of(dtensor));
    }
}

std::size_t num_entries() {
    return self().num_entries;
}

}  // namespace
}  // namespace vescale

PYBIND11_MODULE(_dispatch, module) {
    module.def("install", &vescale::install);
    module.def("uninstall", &vescale::uninstall);
    module.def("remove_composites", &vescale::remove_composites);
    module.def("is_installed", &vescale::is_installed);
    module.def("set_active", &vescale::set_active);
    module.def("observe_writes", &vescale::observe_writes);
    module.def("answer_mixed_calls", &vescale::answer_mixed_calls);
    module.def("clear", &vescale::clear_tables);
    module.def("make_filter", &vescale::make_filter);
    module.def("pass_method", &vescale::pass_method);
    module.def("pass_attribute", &vescale::pass_attribute);
    module.def("convert", torch::wrap_pybind_function(&vescale::convert));
    module.def("link_copy", torch::wrap_pybind_function(&vescale::link_copy));
    module.def("convert_values", torch::wrap_pybind_function(&vescale::convert_values));
    module.def("enter_together", torch::wrap_pybind_function(&vescale::enter_together));
    module.def("leave_local", torch::wrap_pybind_function(&vescale::leave_local));
    module.def("wrap_global", torch::wrap_pybind_function(&vescale::wrap_global));
    module.def(
        "set_local_regions", &vescale::set_local_regions, py::arg("gradient_spec"), py::arg("leaving"), py::arg("wrapping"),
        py::arg("enter_gradient"), py::arg("leave_gradient"), py::arg("wrap_gradient"));
    module.def("set_conversions", &vescale::set_conversions);
    module.def("kept", &vescale::kept);
    module.def("thread_settings", &vescale::thread_settings);
    module.attr("boundary_functions") =
        py::capsule(const_cast<vescale::BoundaryFunctions*>(vescale::own_boundary_functions()), vescale::kBoundaryFunctions);
    using vescale::made_by_calls;
    made_by_calls(py::class_<vescale::LocalConversion>(module, "LocalConversion"))
        .def(py::init<
             py::object, const py::object&, const py::tuple&, const py::tuple&, const py::object&, py::object, py::object,
             py::object, const py::object&, py::object>())
        .def("__call__", torch::wrap_pybind_function(&vescale::convert_local));
    module.def("first_resized", torch::wrap_pybind_function(&vescale::first_resized));
    module.def("first_changed", torch::wrap_pybind_function(&vescale::first_changed));
    module.def("inputs_key", &vescale::inputs_key);
    module.def("local_part", torch::wrap_pybind_function(&vescale::local_part));
    module.def("set_entries", torch::wrap_pybind_function(&vescale::set_entries));
    module.def("delete_entries", torch::wrap_pybind_function(&vescale::delete_entries));
    module.def("first_other_flag", torch::wrap_pybind_function(&vescale::first_other_flag));
    module.def("have_locals", torch::wrap_pybind_function(&vescale::have_locals));
    module.def("set_hook_gate", &vescale::set_hook_gate);
    module.def("take_local_grads", torch::wrap_pybind_function(&vescale::take_local_grads));
    module.def("give_grads", torch::wrap_pybind_function(&vescale::give_grads));
    module.def("are_dtensors_unheld", torch::wrap_pybind_function(&vescale::are_dtensors_unheld));
    module.def("gradients_of", torch::wrap_pybind_function(&vescale::gradients_of));
    module.def("link_view", torch::wrap_pybind_function(&vescale::link_view));
    module.def("require_current", torch::wrap_pybind_function(&vescale::require_current_dtensor));
    module.def("share_version", torch::wrap_pybind_function(&vescale::share_version_with));
    module.def("settle_view", torch::wrap_pybind_function(&vescale::settle_view));
    module.def("settle_group", torch::wrap_pybind_function(&vescale::settle_group));
    module.def("counts", &vescale::counts);
    module.def("reset_counts", &vescale::reset_counts);
    module.def("take_other", &vescale::take_other);
    module.def("held_by", &vescale::held_by);
    made_by_calls(py::class_<vescale::WeakNode>(module, "WeakNode")).def(py::init<const at::Tensor&>()).def("__call__", vescale::method(&vescale::WeakNode::get));
    module.def("num_entries", &vescale::num_entries);
}

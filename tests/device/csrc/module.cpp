#include "sim.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/Generator.h>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace sim {
void bind_runtime(py::module& module);
void bind_group(py::module& module);
void register_ops();
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("start", [] {
        sim::start();
        sim::register_ops();
    });
    module.def("default_generator", [] {
        return py::reinterpret_steal<py::object>(
            THPGenerator_initDefaultGenerator(at::detail::getPrivateUse1Hooks().getDefaultGenerator(0)));
    });
    sim::bind_runtime(module);
    sim::bind_group(module);
}

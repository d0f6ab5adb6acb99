// Torch functions switched off for a scope.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>

namespace vescale {

// Torch functions run as they are: no mode and no subclass sees them.
class NoTorchFunction {
  public:
    NoTorchFunction() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
        at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    }
    ~NoTorchFunction() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }
    NoTorchFunction(const NoTorchFunction&) = delete;
    NoTorchFunction& operator=(const NoTorchFunction&) = delete;

  private:
    at::impl::TorchFunctionDisabledState before_;
};

}  // namespace vescale

// DTensors that are one tensor on one device, and are several here because data moved between them.
//
// Two kinds: the tensors before and behind the boundaries of modules (`Group`), which have one version for autograd, and a tensor
// and the copy of it that is viewed in its place (`ViewLink`). Every write to a DTensor counts in the version of its local
// tensor. These counters are held, and not the tensors, so that no memory is kept. An op that is about to read one of them finds
// out whether another has been written to, and asks Python to raise, or to bring the copy up to date. Nothing happens at a write,
// and nothing depends on when tensors are freed, which may differ between ranks.

#pragma once

#include "call.h"
#include "dtensor.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <bitset>
#include <chrono>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace vescale {

inline c10::VariableVersion version_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter();
}

// A local tensor; views of it, also plain ones, have its version.
struct Side {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion version;
    std::uint32_t seen = 0;

    explicit Side(const at::Tensor& local) : storage(local.storage().getWeakStorageImpl()), version(version_of(local)) {
        see();
    }

    std::uint32_t now() const { return version.enabled() ? version.current_version() : 0; }
    bool has_changed() const { return now() != seen; }
    void see() { seen = now(); }
    bool is_on(const c10::StorageImpl* other) const { return storage._unsafe_get_target() == other; }
};

// Tensors that were equal when their members were added.
struct Group {
    struct Member {
        Side side;
        std::uint64_t edition;  // which values it holds
        py::object outdated;  // () -> raises; of the boundary that made it, or that made the first copy of it
    };
    std::vector<Member> members;
    std::uint64_t edition = 0;  // the newest values

    // Takes note of writes. Two members that were both written to leave values that nobody holds.
    void update() {
        bool is_any_written = false;
        for (auto& member : members) {
            if (member.side.has_changed()) {
                member.side.see();
                const bool held_newest = member.edition == edition && !is_any_written;
                member.edition = held_newest ? edition + 1 : 0;
                is_any_written = true;
            }
        }
        edition += is_any_written;
    }
};

struct ViewLink {
    Side source, copy;
    py::object update;  // (an empty tensor on the copy's storage) -> None; brings the copy up to date
    std::thread::id updated_by;  // the thread that brings the copy up to date; none: nobody does
};

// What is known of a storage. Copies that are viewed are in no group: their sources are. Read and written with the interpreter's lock held.
struct Known {
    std::shared_ptr<Group> group;
    std::shared_ptr<ViewLink> view;  // the storage is its copy's
    std::vector<std::shared_ptr<ViewLink>> copies;  // the storage is their source's
};

// A weak reference to a storage keeps its address from being used again.
inline std::unordered_map<c10::StorageImpl*, Known>& all_links() {
    static auto* made = new std::unordered_map<c10::StorageImpl*, Known>;
    return *made;
}

// Some bits for each storage in the table: most that are asked about have a bit that is not set, and are not looked up.
class LinkedBits {
  public:
    void add(const c10::StorageImpl* storage) { bits_.set(position(storage)); }
    bool may_have(const c10::StorageImpl* storage) const { return bits_.test(position(storage)); }

    template <class Table>
    void count_again(const Table& table) {
        bits_.reset();
        for (const auto& entry : table) {
            add(entry.first);
        }
    }

  private:
    static constexpr std::size_t kNumBits = std::size_t{1} << 14;

    static std::size_t position(const c10::StorageImpl* storage) {
        return (reinterpret_cast<std::uint64_t>(storage) * 0x9e3779b97f4a7c15ULL) >> 50;
    }

    std::bitset<kNumBits> bits_;
};

inline LinkedBits& linked_bits() {
    static auto* made = new LinkedBits;
    return *made;
}

// The entry of a storage, made if there is none.
inline Known& links_of(c10::StorageImpl* storage) {
    linked_bits().add(storage);
    return all_links()[storage];
}

// Drops what no tensor can find any more, when the table has doubled.
inline void sweep_links() {
    static std::size_t limit = 256;
    auto& table = all_links();
    if (table.size() < limit) {
        return;
    }
    std::vector<Known> dropped;  // destroyed last: that may run Python
    for (auto entry = table.begin(); entry != table.end();) {
        auto& [storage, known] = *entry;
        auto& copies = known.copies;
        for (auto copy = copies.begin(); copy != copies.end();) {
            const bool is_over = (*copy)->copy.storage.expired() && !(*copy)->copy.has_changed();
            if (is_over) {
                dropped.push_back(Known{nullptr, std::move(*copy), {}});
            }
            copy = is_over ? copies.erase(copy) : std::next(copy);
        }
        bool is_alive = (known.view && !known.view->copy.storage.expired()) ||
            (!copies.empty() && !copies.front()->source.storage.expired());
        if (known.group) {
            for (const auto& member : known.group->members) {
                is_alive |= member.side.is_on(storage) && !member.side.storage.expired();
            }
        }
        if (is_alive) {
            ++entry;
            continue;
        }
        if (known.group) {
            known.group->update();
            auto& members = known.group->members;
            for (auto member = members.begin(); member != members.end();) {
                if (member->side.is_on(storage)) {
                    dropped.emplace_back(Known{std::make_shared<Group>(Group{{std::move(*member)}}), nullptr, {}});
                    members.erase(member);
                    break;
                }
                ++member;
            }
        }
        dropped.push_back(std::move(known));
        entry = table.erase(entry);
    }
    limit = std::max<std::size_t>(256, 2 * table.size());
    linked_bits().count_again(table);
}

// What a local tensor that may be a viewed copy is a copy of; the tensor itself if it is none.
inline Side base_of(const at::Tensor& local) {
    const auto& table = all_links();
    Side side(local);
    for (auto found = table.find(side.storage._unsafe_get_target()); found != table.end() && found->second.view;
         found = table.find(side.storage._unsafe_get_target())) {
        side = found->second.view->source;  // which lives as long as the copy
    }
    return side;
}

// The local tensor `copy` was made of `source` at a boundary.
inline void add_to_group(const at::Tensor& source, const at::Tensor& copy, const py::object& outdated) {
    auto* from = source.storage().unsafeGetStorageImpl();
    auto* to = copy.storage().unsafeGetStorageImpl();
    if (from == to) {
        return;
    }
    sweep_links();
    Side side = base_of(source);
    from = side.storage._unsafe_get_target();
    auto& group = links_of(from).group;
    if (!group) {
        side.see();
        group = std::make_shared<Group>();
        group->members.push_back({std::move(side), 0, outdated});
    }
    group->update();
    group->members.push_back({Side(copy), group->edition, outdated});
    auto shared = group;
    links_of(to).group = std::move(shared);
}

// `copy` is to be viewed in place of `local`.
inline void add_view(const at::Tensor& local, const at::Tensor& copy, py::object update) {
    sweep_links();
    auto link = std::make_shared<ViewLink>(ViewLink{Side(local), Side(copy), std::move(update), {}});
    links_of(local.storage().unsafeGetStorageImpl()).copies.push_back(link);
    links_of(copy.storage().unsafeGetStorageImpl()).view = std::move(link);
}

// An empty tensor, which has the storage of a side.
inline py::object on_storage(const Side& side) {
    const c10::Storage storage(side.storage.lock());
    c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
    const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
    return owned(THPVariable_Wrap(at::empty({0}, options).set_(storage, 0, {0}, {1})));
}

// What plain tensors have written to a copy reaches nobody. (What depends on whether the copy still exists may differ between
// ranks, and so may not decide here.)
inline void require_no_plain_writes(const ViewLink& link) {
    TORCH_CHECK(
        !link.copy.has_changed(),
        "a view that cuts a sharded dim is a view of a gathered copy, and was written to by way of to_local(): its base does not "
        "get the new values, as it would on one device; write to the DTensor instead");
}

// Until a copy that another thread brings up to date is: bringing it up to date waits for no thread. The lock is held.
inline void wait_for_other_threads(const ViewLink& link) {
    const std::thread::id nobody, own = std::this_thread::get_id();
    while (link.updated_by != nobody && link.updated_by != own) {
        const Unlocked unlocked(true);
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

// Before an op reads a DTensor whose local tensor is on `storage`.
inline void require_current(c10::StorageImpl* storage) {
    auto& table = all_links();
    const auto found = table.find(storage);
    if (found == table.end()) {
        return;
    }
    const Known known = found->second;  // Python may add some
    if (known.view) {
        wait_for_other_threads(*known.view);
    }
    if (known.view && known.view->updated_by == std::thread::id()) {
        auto& link = *known.view;
        require_no_plain_writes(link);
        if (const auto source = link.source.storage.lock()) {
            require_current(source.get());
        }
        if (link.source.has_changed()) {
            link.updated_by = std::this_thread::get_id();
            try {
                owned(PyObject_CallOneArg(link.update.ptr(), on_storage(link.copy).ptr()));
            } catch (...) {
                link.updated_by = std::thread::id();
                throw;
            }
            link.updated_by = std::thread::id();
            link.source.see();
            link.copy.see();
        }
    }
    for (const auto& link : known.copies) {
        require_no_plain_writes(*link);
    }
    if (known.group) {
        known.group->update();
        for (const auto& member : known.group->members) {
            if (!member.side.is_on(storage)) {
                const auto other = table.find(member.side.storage._unsafe_get_target());
                for (std::size_t i = 0; other != table.end() && i < other->second.copies.size(); ++i) {
                    require_no_plain_writes(*other->second.copies[i]);
                }
            } else if (member.edition != known.group->edition) {
                const auto outdated = member.outdated;
                owned(PyObject_CallNoArgs(outdated.ptr()));
            }
        }
    }
}

inline void require_current(const at::Tensor& local) {
    if (all_links().empty() || !local.has_storage()) {
        return;
    }
    auto* storage = local.storage().unsafeGetStorageImpl();
    if (linked_bits().may_have(storage)) {
        require_current(storage);
    }
}

// The lock is held.
inline void require_current_operands(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
    if (all_links().empty() || dtensor_class().type == nullptr) {
        return;
    }
    const auto require = [](const at::Tensor& tensor) {
        if (PyObject* dtensor = tensor.defined() ? dtensor_of(tensor) : nullptr) {
            require_current(local_of(dtensor));
        }
    };
    for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
        if (value.isTensor()) {
            require(value.toTensor());
        } else if (value.isTensorList()) {
            for (const c10::IValue& item : value.toListRef()) {
                require(item.toTensor());
            }
        }
    }
}

// Writes to one count as writes to both.
inline void share_version(const at::Tensor& tensor, const at::Tensor& with) {
    if (!tensor.is_inference() && version_of(with).enabled()) {
        tensor.unsafeGetTensorImpl()->set_version_counter(version_of(with));
    }
}

// A local tensor with the memory of `tensor` gets a version of its own. False: it has other memory, or none.
inline bool give_own_version(const at::Tensor& local, const at::Tensor& tensor) {
    const bool is_alias = tensor.has_storage() && local.has_storage() && local.storage().is_alias_of(tensor.storage());
    if (!is_alias || local.is_inference() || tensor.is_inference() || local.is_same(tensor)) {
        return false;
    }
    local.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(0));
    return true;
}

// Writes to `tensor`, which `made` is a DTensor of, count as writes to it. Its local tensor keeps a version of its own: the two
// that a boundary has made of one share that of the DTensor, and a write to one of them is none to the other's memory.
inline void share_outer_version(const at::Tensor& made, const at::Tensor& tensor) {
    PyObject* dtensor = dtensor_of(made);
    if (dtensor != nullptr && give_own_version(local_of(dtensor), tensor)) {
        share_version(made, tensor);
    }
}

// Of a DTensor, with another one or with the plain tensor that it is made of.
inline void share_version_with(const at::Tensor& made, const at::Tensor& tensor) {
    if (dtensor_of(tensor) != nullptr) {
        share_version(made, tensor);
    } else {
        share_outer_version(made, tensor);
    }
}

// Local tensors of views have the version of the local tensor that they are views of, or of its copy.
inline void share_local_version(const at::Tensor& result, const at::Tensor& local) {
    PyObject* dtensor = result.defined() ? dtensor_of(result) : nullptr;
    if (dtensor == nullptr) {
        return;
    }
    const at::Tensor& own = local_of(dtensor);
    if (own.has_storage() && local.has_storage() && own.storage().is_alias_of(local.storage())) {
        share_version(own, local);
    } else if (own.has_storage()) {
        const auto found = all_links().find(own.storage().unsafeGetStorageImpl());
        if (found != all_links().end() && found->second.view && !own.is_inference() &&
            found->second.view->copy.version.enabled()) {
            own.unsafeGetTensorImpl()->set_version_counter(found->second.view->copy.version);
        }
    }
}

// An op has written to a copy that is viewed, and by that to its source, where nothing has counted the write.
inline void settle_view(const at::Tensor& copy) {
    const auto found = all_links().find(copy.storage().unsafeGetStorageImpl());
    if (found != all_links().end() && found->second.view) {
        auto& source = found->second.view->source;
        if (source.version.enabled()) {
            source.version.bump();
        }
        source.see();
        found->second.view->copy.see();
    }
}

// Counts a write to a DTensor.
inline void count_write(const at::Tensor& local) {
    if (local.is_inference()) {
        return;
    }
    local.unsafeGetTensorImpl()->bump_version();
    if (are_writes_observed() && local.has_storage()) {
        const auto found = all_links().find(local.storage().unsafeGetStorageImpl());
        if (found != all_links().end() && found->second.view) {  // the write has reached its source by now
            found->second.view->copy.see();
        }
    }
}

// Members of a group: `other` has the values of `written`, the newest ones, now.
inline void settle_group(const at::Tensor& written, const at::Tensor& other) {
    const auto found = all_links().find(written.storage().unsafeGetStorageImpl());
    if (found == all_links().end() || !found->second.group) {
        return;
    }
    auto& group = *found->second.group;
    group.update();
    const auto* base = base_of(other).storage._unsafe_get_target();
    for (auto& member : group.members) {
        if (member.side.is_on(found->first) || member.side.is_on(base)) {
            member.side.see();
            member.edition = group.edition;
        }
    }
}

}  // namespace vescale

// Every other operator: its result's shape comes from the Meta device, its work is the CPU's kernel, queued on the
// calling thread's stream. What has no Meta kernel, or a result whose size depends on values, makes the host wait.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "raw_tensor.h"
#include "scheduler.h"

namespace pretend {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using OptionalTensors = c10::List<std::optional<Tensor>>;

// On a GPU the host waits for these too.
const std::set<std::string> WAITS = {
    "aten::nonzero",    "aten::masked_select", "aten::_unique2",
    "aten::equal",      "aten::is_set_to",     "aten::_local_scalar_dense",
    "aten::bincount",   "aten::repeat_interleave",
    "aten::unique_dim", "aten::unique_consecutive", "aten::histc",
};

// One argument without its tensors' owners, so that a task can hold it.
struct Argument {
  enum Kind { PLAIN, TENSOR, LIST, OPTIONAL_LIST } kind = PLAIN;
  IValue plain;
  std::vector<RawTensor> tensors;
  std::vector<bool> present;  // of an OPTIONAL_LIST

  IValue on_the_host() const {
    if (kind == PLAIN) return plain;
    if (kind == TENSOR) return on_host(tensors[0]);
    if (kind == LIST) {
      c10::List<Tensor> list;
      for (const RawTensor &tensor : tensors) list.push_back(on_host(tensor));
      return list;
    }
    OptionalTensors list;
    for (size_t i = 0; i < tensors.size(); i++) {
      list.push_back(present[i] ? std::optional<Tensor>(on_host(tensors[i])) : std::nullopt);
    }
    return list;
  }
};

// Where the tensors of one result go.
struct Result {
  std::vector<RawTensor> tensors;
  std::vector<bool> fresh;  // else it is an argument, which the kernel has written
};

bool is_tensor(const IValue &value) { return value.isTensor() && value.toTensor().defined(); }

void fill(const RawTensor &to, const Tensor &from) {
  if (to.data != nullptr && from.defined()) on_host(to).copy_(from);
}

class Call {
 public:
  Call(const c10::OperatorHandle &op, Stack *stack) : op_(op), name_(op.schema().name()), stack_(stack) {
    const auto &declared = op.schema().arguments();
    given_.assign(stack->end() - declared.size(), stack->end());
    for (size_t i = 0; i < given_.size(); i++) {
      const auto *alias = declared[i].alias_info();
      arguments_.push_back(argument(given_[i], alias != nullptr && alias->isWrite()));
    }
    if (WAITS.count(name_)) reason_ = name_;
  }

  void run() {
    if (reason_.empty() && !writes_to_host_ && shapes_known()) run_later();
    else run_now();
  }

 private:
  // ---- arguments

  RawTensor taken(const Tensor &tensor, bool written) {
    if (tensor.is_cuda()) return raw(tensor);
    if (written) {
      writes_to_host_ = true;
      return raw(tensor);
    }
    copies_.push_back(tensor.clone());  // the host's tensor may change before the device comes to it
    return raw(copies_.back());
  }

  Argument argument(const IValue &value, bool written) {
    Argument out;
    if (is_tensor(value)) {
      out.kind = Argument::TENSOR;
      out.tensors.push_back(taken(value.toTensor(), written));
    } else if (value.isTensorList()) {
      out.kind = Argument::LIST;
      for (const Tensor &tensor : value.toTensorVector()) out.tensors.push_back(taken(tensor, written));
    } else if (value.isOptionalTensorList()) {
      out.kind = Argument::OPTIONAL_LIST;
      for (const std::optional<Tensor> &tensor : value.toOptionalTensorVector()) {
        out.present.push_back(tensor && tensor->defined());
        out.tensors.push_back(out.present.back() ? taken(*tensor, false) : RawTensor{});
      }
    } else {
      out.plain = value.isDevice() ? IValue(c10::Device(c10::kCPU)) : value;
    }
    return out;
  }

  // ---- shapes

  Tensor meta_of(const Tensor &tensor) {
    if (!tensor.is_cuda() && tensor.dim() == 0) return tensor;
    Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
    metas_.push_back(meta);
    originals_.push_back(tensor);
    return meta;
  }

  IValue meta_argument(const IValue &value) {
    if (is_tensor(value)) return meta_of(value.toTensor());
    if (value.isDevice()) return c10::Device(c10::kMeta);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &tensor : value.toTensorVector()) list.push_back(meta_of(tensor));
      return list;
    }
    if (!value.isOptionalTensorList()) return value;
    OptionalTensors list;
    for (const std::optional<Tensor> &tensor : value.toOptionalTensorVector()) {
      const bool defined = tensor && tensor->defined();
      list.push_back(defined ? std::optional<Tensor>(meta_of(*tensor)) : std::nullopt);
    }
    return list;
  }

  bool shapes_known() {
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      for (const IValue &value : given_) inferred_.push_back(meta_argument(value));
      op_.callBoxed(&inferred_);
    } catch (const std::exception &) {
      return false;
    }
    for (size_t i = 0; i < metas_.size(); i++) {
      if (metas_[i].sizes() != originals_[i].sizes()) resize(originals_[i], metas_[i].sizes(), {});
    }
    for (size_t i = 0; i < given_.size(); i++) {  // an `out` may have moved when it was resized
      if (is_tensor(given_[i]) && given_[i].toTensor().is_cuda()) arguments_[i].tensors[0] = raw(given_[i].toTensor());
    }
    if (name_ == "aten::native_layer_norm") give_statistics_the_type_of_the_cpu();
    return true;
  }

  // The CPU keeps a layer norm's mean and deviation in the type of its parameters, the GPU and Meta in fp32.
  void give_statistics_the_type_of_the_cpu() {
    const Tensor typed = is_tensor(given_[2]) ? given_[2].toTensor() : given_[0].toTensor();
    for (int i : {1, 2}) inferred_[i] = at::empty_like(inferred_[i].toTensor(), typed.scalar_type());
  }

  // ---- behind what the stream has been given

  Tensor placed(const Tensor &meta, Result &result) {
    result.fresh.push_back(false);
    result.tensors.emplace_back();
    if (!meta.defined()) return meta;
    for (size_t i = 0; i < metas_.size(); i++) {
      if (metas_[i].is_same(meta)) return originals_[i];
    }
    Tensor tensor = new_on_device(meta.sizes(), meta.strides(), meta.scalar_type());
    result.fresh.back() = true;
    result.tensors.back() = raw(tensor);
    return tensor;
  }

  void run_later() {
    std::vector<Result> results;
    Stack returned;
    for (const IValue &value : inferred_) {
      Result result;
      if (value.isTensor()) {
        returned.emplace_back(placed(value.toTensor(), result));
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor &tensor : value.toTensorVector()) list.push_back(placed(tensor, result));
        returned.emplace_back(list);
      } else {
        returned.push_back(value);
      }
      results.push_back(std::move(result));
    }
    Scheduler::get().add(current_stream(), [op = op_, arguments = std::move(arguments_), results = std::move(results),
                                            copies = std::move(copies_)] {
      Stack host;
      for (const Argument &argument : arguments) host.push_back(argument.on_the_host());
      op.callBoxed(&host);
      for (size_t i = 0; i < results.size(); i++) store(results[i], host[i]);
    });
    leave(std::move(returned));
  }

  static void store(const Result &result, const IValue &made) {
    if (made.isTensorList()) {
      const auto tensors = made.toTensorVector();
      for (size_t i = 0; i < result.fresh.size(); i++) {
        if (result.fresh[i]) fill(result.tensors[i], tensors[i]);
      }
    } else if (!result.fresh.empty() && result.fresh[0]) {
      fill(result.tensors[0], made.toTensor());
    }
  }

  // ---- at once

  void run_now() {
    if (!reason_.empty() || writes_to_host_) note_wait(reason_.empty() ? name_ + " writes to the host" : reason_);
    wait();
    at::AutoDispatchBelowADInplaceOrView below;
    Stack host;
    std::vector<std::pair<Tensor, Tensor>> pairs;  // what was given, and what stands for it
    for (size_t i = 0; i < given_.size(); i++) {
      host.push_back(arguments_[i].on_the_host());
      pair_up(pairs, given_[i], host.back(), arguments_[i].kind);
    }
    op_.callBoxed(&host);
    Stack returned;
    for (const IValue &value : host) returned.push_back(brought_back(value, pairs));
    leave(std::move(returned));
  }

  static void pair_up(std::vector<std::pair<Tensor, Tensor>> &pairs, const IValue &given, const IValue &host,
                      Argument::Kind kind) {
    if (kind == Argument::TENSOR) pairs.emplace_back(given.toTensor(), host.toTensor());
    if (kind != Argument::LIST) return;
    const auto originals = given.toTensorVector(), copies = host.toTensorVector();
    for (size_t i = 0; i < originals.size(); i++) pairs.emplace_back(originals[i], copies[i]);
  }

  static Tensor to_device(const Tensor &tensor, const std::vector<std::pair<Tensor, Tensor>> &pairs) {
    if (!tensor.defined()) return tensor;
    for (const auto &[original, copy] : pairs) {
      if (copy.is_same(tensor)) return original;
    }
    Tensor moved = new_on_device(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    Scheduler::get().add(current_stream(), [to = raw(moved), tensor] { fill(to, tensor); });
    wait();
    return moved;
  }

  static IValue brought_back(const IValue &value, const std::vector<std::pair<Tensor, Tensor>> &pairs) {
    if (value.isTensor()) return to_device(value.toTensor(), pairs);
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor &tensor : value.toTensorVector()) list.push_back(to_device(tensor, pairs));
    return list;
  }

  static void wait() { Scheduler::get().finish(current_stream(), Scheduler::get().latest(current_stream())); }

  void leave(Stack returned) {
    torch::jit::drop(*stack_, given_.size());
    for (IValue &value : returned) stack_->push_back(std::move(value));
  }

  c10::OperatorHandle op_;
  std::string name_, reason_;  // why the host has to wait, if it has
  Stack *stack_;
  std::vector<IValue> given_;
  std::vector<Argument> arguments_;
  std::vector<Tensor> copies_, originals_, metas_;
  Stack inferred_;
  bool writes_to_host_ = false;
};

void fallback(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) { Call(op, stack).run(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// torch would take these apart into other operators, which round otherwise.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const char *name :
       {"native_layer_norm", "native_group_norm", "native_dropout", "silu_backward", "mish_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace pretend

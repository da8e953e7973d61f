// Calls of the bundled operations replayed without Python: a call site of a captured graph keeps what its call did, for the arguments
// that it was made with (recording.py), and does it again where arguments of the same layouts come.
//
// Recorded  a call is allocations, launches and calls of PyTorch's operators in an order, on slots: its tensor arguments, then what they
//           make. An address is a slot's and an offset, all else that is passed is constant.
// Site      what the graph calls. The first recording that fits the arguments is replayed; where none does, `miss` runs the operation in
//           Python, and may add one.
// Call      the autograd node. Its backward is replayed too, once Python has run and recorded it (`Recorded::context`); Python runs it again
//           whenever it is not as recorded: create_graph, other layouts or streams, functorch.
//
// Compiled by the user's C++ compiler at first use (native.py), without CUDA's headers: launches go through the driver's own
// cuLaunchKernelEx, whose address Python knows.

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

constexpr int MOST_ARGUMENTS = 48;
constexpr int NONE = -1;  // in place of a slot

struct Config {  // CUlaunchConfig
  unsigned int grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned int number;
};
using LaunchKernel = int (*)(const Config*, void* function, void** arguments, void** extra);

// What a tensor must be for a recording to fit it. Also: it begins at a multiple of 16 bytes.
struct Layout {
  bool there = false;
  at::ScalarType dtype{};
  c10::Device device{c10::DeviceType::CPU};
  uint64_t keys = 0;  // of the dispatcher: tells subclasses, wrappers and inference tensors apart
  bool wants = false;  // a gradient
  std::vector<int64_t> sizes, strides;

  explicit Layout(const Tensor& t) : there(t.defined()) {
    if (!there) return;
    dtype = t.scalar_type(), device = t.device(), keys = t.key_set().raw_repr(), wants = t.requires_grad();
    sizes = t.sizes().vec(), strides = t.strides().vec();
  }

  bool fits(const Tensor& t) const {
    if (!there || !t.defined()) return there == t.defined();
    return t.key_set().raw_repr() == keys && t.scalar_type() == dtype && t.device() == device && t.sizes() == sizes &&
           t.strides() == strides && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  }
};

int64_t current_stream(c10::Device device) {
  if (device.is_cpu()) return 0;  // emulated kernels
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// torch.func's transforms and forward-mode differentiation: tensors have no memory of their own there.
bool transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// Throws what Python has raised, so that it reaches whoever called autograd from another thread.
[[noreturn]] void throw_raised(py::error_already_set& error) {
  error.restore();
  python_error raised;
  raised.persist();
  throw raised;
}

using EncodeMap = int (*)(void* map, int type, unsigned int rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                          const unsigned int* box, const unsigned int* steps, int interleave, int swizzle, int promotion, int fill);
EncodeMap encode_map = nullptr;  // the driver's cuTensorMapEncodeTiled

// A tensor map (ops/tensor_map.py).
struct Map {
  int64_t offset;
  std::array<uint64_t, 5> sizes;
  std::array<uint64_t, 4> strides;
  std::array<unsigned int, 5> box;
  int swizzle;
};
constexpr int MOST_MAPS = 4;
struct alignas(64) Maps {
  char bytes[MOST_MAPS * 128];
};

struct Argument {
  int slot = NONE;
  int64_t offset = 0;
  uint64_t value = 0;  // where there is no slot
  std::vector<Map> maps;  // of the slot, in place of its address
};

struct Step {
  // An allocation, into `slot`.
  int slot = NONE;
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  // Or a launch.
  Config config{};
  LaunchKernel launch = nullptr;  // null: `kernel` alone can
  void* function = nullptr;
  std::vector<Argument> arguments;
  py::object kernel, constants;  // as Python calls it: an ops/cuda_driver.Kernel, and its arguments, None for what has a slot
  bool cooperative = false;
  // Or a call of an operator, as it came behind autocast.
  std::optional<c10::OperatorHandle> called;
  std::vector<c10::IValue> given;
  std::vector<std::pair<int, int>> filled;  // (argument, slot)
  std::vector<int> made;  // the slot of each result

  std::vector<int> done;  // slots that nothing behind this step needs: their memory is free for what is allocated next

  void run(variable_list& slots) const {
    act(slots);
    for (int last : done) slots[last].reset();
  }

  void act(variable_list& slots) const {
    if (slot != NONE) {
      slots[slot] = at::empty_strided(sizes, strides, options);
    } else if (called) {
      call(slots);
    } else if (launch == nullptr) {
      by_python(slots);
    } else if (driven(slots) != 0) {
      once_more(slots);
    }
  }

  void call(variable_list& slots) const {
    const c10::impl::ExcludeDispatchKeyGuard cast_already(c10::autocast_dispatch_keyset);
    torch::jit::Stack stack = given;
    for (const auto& [argument, from] : filled) stack[argument] = slots[from];
    called->callBoxed(stack);
    for (size_t i = 0; i < made.size(); ++i)
      if (made[i] != NONE) slots[made[i]] = stack[i].toTensor();
  }

  static int encode(const Argument& of, const variable_list& slots, Maps& made) {
    constexpr unsigned int each[5] = {1, 1, 1, 1, 1};
    char* address = static_cast<char*>(const_cast<void*>(slots[of.slot].const_data_ptr()));
    for (size_t i = 0; i < of.maps.size(); ++i) {
      const Map& m = of.maps[i];
      // 16-bit integers, not interleaved, lines of 128 bytes, zeros beyond the edges.
      const int status = encode_map(made.bytes + 128 * i, 1, 5, address + m.offset, m.sizes.data(), m.strides.data(), m.box.data(), each, 0,
                                    m.swizzle, 2, 0);
      if (status != 0) return status;
    }
    return 0;
  }

  int driven(const variable_list& slots) const {
    std::array<uint64_t, MOST_ARGUMENTS> values;
    std::array<void*, MOST_ARGUMENTS> places;
    std::array<Maps, 2> maps;
    size_t mapped = 0;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const Argument& a = arguments[i];
      if (!a.maps.empty()) {
        Maps& made = maps[mapped++];
        if (const int status = encode(a, slots, made)) return status;
        places[i] = made.bytes;
        continue;
      }
      values[i] = a.slot == NONE ? a.value : reinterpret_cast<uintptr_t>(slots[a.slot].const_data_ptr()) + a.offset;
      places[i] = &values[i];
    }
    return launch(&config, function, places.data(), nullptr);
  }

  // Of a kernel that only Python can launch: an emulated one.
  void by_python(const variable_list& slots) const {
    py::gil_scoped_acquire gil;
    try {
      py::tuple given(arguments.size());
      for (size_t i = 0; i < arguments.size(); ++i) {
        const Argument& a = arguments[i];
        given[i] = a.slot == NONE ? py::object(constants[py::int_(i)])
                                  : py::object(py::cast(slots[a.slot]).attr("data_ptr")() + py::int_(a.offset));
      }
      const auto triple = [](const unsigned int* v) { return py::make_tuple(v[0], v[1], v[2]); };
      const auto stream = reinterpret_cast<uintptr_t>(config.stream);
      kernel(triple(config.grid), triple(config.block), given, config.shared, stream, py::arg("cooperative") = cooperative);
    } catch (py::error_already_set& error) {
      throw_raised(error);
    }
  }

  // As ops/cuda_driver.Kernel does: the device may not be current in this thread.
  void once_more(const variable_list& slots) const {
    py::gil_scoped_acquire gil;
    try {
      const py::object current = kernel.attr("current")();
      current.attr("__enter__")();
      const int status = driven(slots);
      current.attr("__exit__")(py::none(), py::none(), py::none());
      if (status != 0) kernel.attr("refuse")(status);
    } catch (py::error_already_set& error) {
      throw_raised(error);
    }
  }
};

// ("allocate", slot, sizes, strides, dtype, device), ("call", name, overload, arguments, [(argument, slot)], slots of results) or
// ("launch", kernel, launch, function, attributes, number, grid, block, arguments, shared, stream, cooperative), where an argument is
// (slot, offset), (slot, [what a tensor map is made of]) or (bytes, what Python passes).
Step step(const py::tuple& of) {
  Step made;
  const auto kind = of[0].cast<std::string>();
  if (kind == "allocate") {
    made.slot = of[1].cast<int>();
    made.sizes = of[2].cast<std::vector<int64_t>>(), made.strides = of[3].cast<std::vector<int64_t>>();
    made.options = at::TensorOptions().dtype(of[4].cast<at::ScalarType>()).device(of[5].cast<c10::Device>());
    return made;
  }
  if (kind == "call") {
    made.called = c10::Dispatcher::singleton().findSchemaOrThrow(of[1].cast<std::string>().c_str(), of[2].cast<std::string>().c_str());
    const auto& parameters = made.called->schema().arguments();
    const auto values = of[3].cast<py::tuple>();
    TORCH_CHECK(values.size() == parameters.size(), "a call has ", values.size(), " arguments");
    made.filled = of[4].cast<std::vector<std::pair<int, int>>>();
    made.made = of[5].cast<std::vector<int>>();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool later = std::any_of(made.filled.begin(), made.filled.end(), [&](const auto& pair) { return pair.first == static_cast<int>(i); });
      made.given.push_back(later ? c10::IValue() : torch::jit::toIValue(values[i], parameters[i].real_type()));
    }
    return made;
  }
  const auto address = [&](int i) { return reinterpret_cast<void*>(of[i].cast<uintptr_t>()); };
  made.kernel = of[1];
  made.launch = reinterpret_cast<LaunchKernel>(address(2)), made.function = address(3);
  made.config.attributes = address(4), made.config.number = of[5].cast<unsigned int>();
  for (int i = 0; i < 3; ++i) {
    made.config.grid[i] = py::tuple(of[6])[i].cast<unsigned int>();
    made.config.block[i] = py::tuple(of[7])[i].cast<unsigned int>();
  }
  py::list constants;
  int mapped = 0;
  for (const py::handle& item : py::tuple(of[8])) {
    const auto pair = item.cast<py::tuple>();
    Argument argument;
    if (py::isinstance<py::bytes>(pair[0])) {
      const auto bytes = pair[0].cast<std::string>();
      TORCH_CHECK(bytes.size() <= sizeof argument.value, "a launch's constant has ", bytes.size(), " bytes");
      std::memcpy(&argument.value, bytes.data(), bytes.size());
      constants.append(pair[1]);
    } else {
      argument.slot = pair[0].cast<int>();
      if (py::isinstance<py::int_>(pair[1])) {
        argument.offset = pair[1].cast<int64_t>();
      } else {
        using Described = std::tuple<int64_t, std::array<uint64_t, 5>, std::array<uint64_t, 4>, std::array<unsigned int, 5>, int>;
        for (const auto& [offset, sizes, strides, box, swizzle] : pair[1].cast<std::vector<Described>>())
          argument.maps.push_back({offset, sizes, strides, box, swizzle});
        TORCH_CHECK(argument.maps.size() <= MOST_MAPS && ++mapped <= 2, "a launch has more tensor maps than there is room for");
      }
      constants.append(py::none());
    }
    made.arguments.push_back(argument);
  }
  TORCH_CHECK(made.arguments.size() <= MOST_ARGUMENTS, "a launch has ", made.arguments.size(), " arguments");
  made.constants = constants;
  made.config.shared = of[9].cast<unsigned int>(), made.config.stream = address(10), made.cooperative = of[11].cast<bool>();
  return made;
}

// Of those slots that are none of `kept`, each is let go behind the last step that uses it.
std::vector<Step> steps(const py::list& of, int slots, std::initializer_list<const std::vector<int>*> kept) {
  std::vector<Step> made;
  for (const py::handle& item : of) made.push_back(step(item.cast<py::tuple>()));
  std::vector<bool> needed(slots, false);
  for (const auto* some : kept)
    for (int slot : *some)
      if (slot != NONE) needed[slot] = true;
  for (auto step = made.rbegin(); step != made.rend(); ++step) {
    const auto use = [&](int slot) {
      if (slot == NONE || needed[slot]) return;
      needed[slot] = true;
      step->done.push_back(slot);
    };
    use(step->slot);
    for (const Argument& argument : step->arguments) use(argument.slot);
    for (const auto& [_, slot] : step->filled) use(slot);
    for (int slot : step->made) use(slot);
  }
  return made;
}

Tensor at_slot(const variable_list& slots, int slot) { return slot == NONE ? Tensor() : slots[slot]; }

using Counters = std::vector<std::pair<py::object, py::object>>;  // (Counter, key): one more each time

void count(const Counters& counters) {
  for (const auto& [counter, key] : counters) {
    PyObject* before = PyDict_GetItemWithError(counter.ptr(), key.ptr());
    const auto now = py::reinterpret_steal<py::object>(PyLong_FromLong(before == nullptr ? 1 : PyLong_AsLong(before) + 1));
    if (!now || PyDict_SetItem(counter.ptr(), key.ptr(), now.ptr()) != 0) throw py::error_already_set();
  }
}

// Of saved tensors, then gradients from above, then what is allocated.
struct Backward {
  std::vector<Layout> inputs;
  std::vector<Step> program;
  std::vector<int> gradients;  // the slot of each argument's of the Function
  Counters counters;
  int slots;
  c10::Device device;
  int64_t stream;
};

struct Recorded {
  // What it is for. An argument of the site is a tensor, the next of `inputs`, a list or tuple of some, or a constant.
  std::vector<py::object> constants;  // null where there are tensors
  std::vector<Py_ssize_t> listed;  // how many are in a list or tuple; NONE where there is none
  std::vector<Layout> inputs;
  bool grad, autocast;
  long state;
  int64_t stream;
  // What it does.
  std::vector<Step> program;
  int slots;
  std::vector<int> outputs;
  std::vector<int> differentiable, positions;  // slots of inputs that autograd sees, and which of the Function's arguments they are
  std::vector<int> saved, dirty, constant;  // slots; `constant`: outputs without a gradient
  std::vector<int> released;  // slots of `saved` that are outputs, which a backward lets go of behind their last use
  bool single, materialize;  // `single`: the Function gives out a tensor, not a tuple
  int pick = NONE;  // which of the outputs the site gives out; all of them
  Counters counters;
  py::object context;  // backward(this, saved, gradients) in Python; may set_backward
  std::atomic<Backward*> backward{nullptr};

  // Whoever lets it go last, a thread of autograd's perhaps, may not have Python's lock.
  ~Recorded() {
    if (!Py_IsInitialized()) {
      for (py::object& constant : constants) constant.release();
      for (auto& [counter, key] : counters) counter.release(), key.release();
      for (Step& step : program) step.kernel.release(), step.constants.release();
      context.release();
      return;  // and its backward stays where it is
    }
    py::gil_scoped_acquire gil;
    constants.clear(), counters.clear(), program.clear(), context = py::object();
    delete backward.load();
  }
};

// A recording as a node keeps it: in a tensor's memory, of all that autograd lets a node keep what compiled autograd takes too.
Tensor token(const std::shared_ptr<Recorded>& of) {
  auto* kept = new std::shared_ptr<Recorded>(of);
  const auto release = [](void* memory) { delete static_cast<std::shared_ptr<Recorded>*>(memory); };
  return at::from_blob(kept, {static_cast<int64_t>(sizeof *kept)}, release, at::TensorOptions().dtype(at::kByte));
}

const std::shared_ptr<Recorded>& recorded(const c10::IValue& token) {
  return *static_cast<const std::shared_ptr<Recorded>*>(token.toTensor().const_data_ptr());
}

// Outputs that a node keeps beside what autograd saves for it, which it could not let go of before its backward ends. Each under a name of its
// own: lists of tensors compiled autograd does not take. Where hooks are asked about what is saved (checkpoints, save_on_cpu) they are about
// these too, and autograd saves them.
struct Kept {
  static std::string name(size_t i) { return "kept" + std::to_string(i); }

  // Whether a node that is made now keeps any, for a backward that it may have.
  static bool any(const Recorded& of) {
    return !of.released.empty() && of.grad && !c10::InferenceMode::is_enabled() && !at::SavedTensorDefaultHooks::get_hooks();
  }

  static void put(AutogradContext* ctx, const Recorded& of, const variable_list& slots) {
    std::vector<int64_t> versions;
    for (size_t i = 0; i < of.released.size(); ++i) {
      const Tensor& output = slots[of.released[i]];
      ctx->saved_data.emplace(name(i), output.detach());  // the node behind an output must not have the output
      versions.push_back(static_cast<int64_t>(output._version()));
    }
    ctx->saved_data.emplace("versions", versions);
  }

  // Into the slots of saved tensors; out of the node, unless the graph is kept.
  static void take(AutogradContext* ctx, const Recorded& of, variable_list& slots) {
    const auto noted = ctx->saved_data.find("versions");
    if (noted == ctx->saved_data.end()) return;
    const auto versions = noted->second.toIntVector();
    for (size_t i = 0; i < of.released.size(); ++i) {
      const auto kept = ctx->saved_data.find(name(i));
      TORCH_INTERNAL_ASSERT(kept != ctx->saved_data.end());  // a second backward has been refused by now, for the saved tensors
      const Tensor tensor = kept->second.toTensor();
      TORCH_CHECK(static_cast<int64_t>(tensor._version()) == versions[i],
                  "one of the variables needed for gradient computation has been modified by an inplace operation: a result is at version ",
                  tensor._version(), "; expected version ", versions[i]);
      const Tensor output = at::GradMode::is_enabled() ? behind(of, of.released[i], tensor) : tensor;
      for (size_t saved = 0; saved < of.saved.size(); ++saved)
        if (of.saved[saved] == of.released[i]) slots[saved] = output;
      if (!torch::autograd::get_current_graph_task_keep_graph()) ctx->saved_data.erase(kept);
    }
  }

  // An output as autograd knows it, for second derivatives: with this node behind it.
  static Tensor behind(const Recorded& of, int slot, const Tensor& tensor) {
    uint32_t number = 0;
    for (int output : of.outputs) {
      if (output == slot) break;
      number += output != NONE;
    }
    return torch::autograd::make_variable(tensor, torch::autograd::Edge(torch::autograd::get_current_node(), number));
  }
};

struct Call : torch::autograd::Function<Call> {
  static variable_list forward(AutogradContext* ctx, at::TensorList, const Recorded* of, variable_list* slots, const c10::IValue& token,
                               bool ready) {
    if (!ready)
      for (const Step& step : of->program) step.run(*slots);
    variable_list found, saved, marked, constant;
    for (int slot : of->outputs)
      if (slot != NONE) found.push_back((*slots)[slot]);
    const bool keeps = Kept::any(*of);
    const auto released = [&](int slot) { return std::find(of->released.begin(), of->released.end(), slot) != of->released.end(); };
    for (int slot : of->saved) saved.push_back(keeps && released(slot) ? Tensor() : at_slot(*slots, slot));
    ctx->save_for_backward(std::move(saved));
    if (keeps) Kept::put(ctx, *of, *slots);
    for (int slot : of->dirty) marked.push_back((*slots)[slot]);
    if (!marked.empty()) ctx->mark_dirty(marked);
    for (int slot : of->constant) constant.push_back((*slots)[slot]);
    if (!constant.empty()) ctx->mark_non_differentiable(constant);
    ctx->set_materialize_grads(of->materialize);
    ctx->saved_data.emplace("of", token);
    return found;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& above) {
    const c10::IValue token = ctx->saved_data.at("of");
    const std::shared_ptr<Recorded>& of = recorded(token);
    variable_list slots = ctx->get_saved_variables();
    if (!of->released.empty()) Kept::take(ctx, *of, slots);
    auto next = above.begin();
    for (int output : of->outputs) slots.push_back(output == NONE ? Tensor() : *next++);
    variable_list found(of->differentiable.size() + 4);  // and one for each other argument of `forward`
    const Backward* known = of->backward.load(std::memory_order_acquire);
    if (known != nullptr && fits(*known, slots)) {
      slots.resize(known->slots);
      for (const Step& step : known->program) step.run(slots);
      for (size_t i = 0; i < of->positions.size(); ++i) found[i] = at_slot(slots, known->gradients[of->positions[i]]);
      if (!known->counters.empty()) {
        py::gil_scoped_acquire gil;
        count(known->counters);
      }
      return found;
    }
    py::gil_scoped_acquire gil;
    try {
      const auto begin = slots.begin(), middle = begin + static_cast<long>(of->saved.size());
      const auto objects = [](auto from, auto to) {
        py::list made;
        for (; from != to; ++from) made.append(from->defined() ? py::cast(*from) : py::none());
        return made;
      };
      const py::list saved = objects(begin, middle), given = objects(middle, slots.end());
      slots.clear();  // Python may let go of some before it ends
      const py::tuple gradients = of->context.attr("backward")(py::cast(of), saved, given);
      for (size_t i = 0; i < of->positions.size(); ++i) {
        const py::object gradient = gradients[of->positions[i]];
        if (!gradient.is_none()) found[i] = gradient.cast<Tensor>();
      }
    } catch (py::error_already_set& error) {
      throw_raised(error);
    }
    return found;
  }

  static bool fits(const Backward& known, const variable_list& slots) {
    if (at::GradMode::is_enabled() || transformed() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
    if (known.inputs.size() != slots.size()) return false;
    for (size_t i = 0; i < slots.size(); ++i)
      if (!known.inputs[i].fits(slots[i])) return false;
    return current_stream(known.device) == known.stream;
  }
};

// The recording's outputs, with autograd's node behind them. Slots are filled as far as the inputs, or, once `ready`, all.
py::object attach(const c10::IValue& token, variable_list& slots, bool ready) {
  const std::shared_ptr<Recorded>& of = recorded(token);
  variable_list inputs;
  for (int slot : of->differentiable) inputs.push_back(slots[slot]);
  const variable_list found = Call::apply(at::TensorList(inputs), of.get(), &slots, token, ready);
  auto next = found.begin();
  py::tuple all(of->outputs.size());
  for (size_t i = 0; i < of->outputs.size(); ++i) all[i] = of->outputs[i] == NONE ? py::none() : py::cast(*next++);
  if (of->single) return all[0];
  return of->pick == NONE ? py::object(all) : py::object(all[of->pick]);
}

// None where there is no tensor.
variable_list tensors(const py::list& of) {
  variable_list made;
  for (const py::handle& item : of) made.push_back(item.is_none() ? Tensor() : item.cast<Tensor>());
  return made;
}

// Whether it is a list or tuple, and of tensors.
bool holds_tensors(const py::handle& of) {
  if (!PyList_Check(of.ptr()) && !PyTuple_Check(of.ptr())) return false;
  PyObject* const* items = PySequence_Fast_ITEMS(of.ptr());
  const Py_ssize_t number = PySequence_Fast_GET_SIZE(of.ptr());
  return number > 0 && std::all_of(items, items + number, [](PyObject* item) { return THPVariable_Check(item); });
}

struct Site : std::enable_shared_from_this<Site> {
  py::object miss, state;  // miss(this, *arguments): no part of it may have this, or neither would ever be freed
  std::vector<c10::IValue> known;  // tokens
  std::string name;
  PyMethodDef definition{};

  bool fits(const Recorded& of, PyObject* const* args, Py_ssize_t number, long now, variable_list& slots) const {
    if (of.state != now || of.grad != at::GradMode::is_enabled() || of.constants.size() != static_cast<size_t>(number)) return false;
    slots.clear();
    c10::Device device(c10::DeviceType::CPU);
    for (Py_ssize_t i = 0; i < number; ++i) {
      if (const PyObject* constant = of.constants[i].ptr()) {
        if (constant == args[i]) continue;
        if (Py_TYPE(constant) != Py_TYPE(args[i])) return false;
        const int same = PyObject_RichCompareBool(const_cast<PyObject*>(constant), args[i], Py_EQ);
        if (same < 0) PyErr_Clear();
        if (same != 1) return false;
        continue;
      }
      const bool list = PyList_Check(args[i]) || PyTuple_Check(args[i]);
      if (list ? of.listed[i] != PySequence_Fast_GET_SIZE(args[i]) : of.listed[i] != NONE) return false;
      PyObject* const* items = list ? PySequence_Fast_ITEMS(args[i]) : &args[i];
      for (Py_ssize_t item = 0; item < (list ? of.listed[i] : 1); ++item) {
        if (!THPVariable_Check(items[item])) return false;
        const Tensor& tensor = THPVariable_Unpack(items[item]);
        const Layout& layout = of.inputs[slots.size()];
        if (!layout.fits(tensor) || (of.grad && layout.wants != tensor.requires_grad())) return false;
        device = tensor.device();
        slots.push_back(tensor);
      }
    }
    return of.autocast == at::autocast::is_autocast_enabled(device.type()) && current_stream(device) == of.stream;
  }

  PyObject* call(PyObject* const* args, Py_ssize_t number) {
    if (!known.empty() && !transformed() && !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      const long now = state().cast<long>();
      variable_list slots;
      for (size_t i = 0; i < known.size(); ++i) {
        const c10::IValue token = known[i];
        const Recorded& of = *recorded(token);
        if (!fits(of, args, number, now, slots)) continue;
        slots.resize(of.slots);
        count(of.counters);
        return attach(token, slots, false).release().ptr();
      }
    }
    py::tuple given(number + 1);
    given[0] = py::cast(shared_from_this());
    for (Py_ssize_t i = 0; i < number; ++i) given[i + 1] = py::reinterpret_borrow<py::object>(args[i]);
    return py::object(miss(*given)).release().ptr();
  }
};

PyObject* call_site(PyObject* self, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  return reinterpret_cast<Site*>(PyCapsule_GetPointer(self, "advisor.site"))->call(args, number);
  END_HANDLE_TH_ERRORS
}

// A function as Python calls it. The site lives as long as it.
py::object function(std::shared_ptr<Site> site) {
  auto* kept = new std::shared_ptr<Site>(std::move(site));
  Site& of = **kept;
  of.definition = {of.name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_site)), METH_FASTCALL, nullptr};
  py::object self = py::reinterpret_steal<py::object>(PyCapsule_New(&of, "advisor.site", [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Site>*>(PyCapsule_GetContext(capsule));
  }));
  PyCapsule_SetContext(self.ptr(), kept);
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&of.definition, self.ptr(), py::str("advisor.ops.sites").ptr()));
}

}  // namespace

PYBIND11_MODULE(ADVISOR_NATIVE, m) {
  m.def("use", [](uintptr_t encoder) { encode_map = reinterpret_cast<EncodeMap>(encoder); });
  py::class_<Recorded, std::shared_ptr<Recorded>>(m, "Recorded")
      .def(py::init([](const py::list& arguments, const variable_list& inputs, const variable_list& slots, const py::list& program,
                       std::vector<int> outputs, std::vector<int> differentiable, std::vector<int> positions,
                       std::vector<int> saved, std::vector<int> released, std::vector<int> dirty, std::vector<int> constant, bool single,
                       bool materialize, py::object context, long state) {
        auto made = std::make_shared<Recorded>();
        for (const py::handle& argument : arguments) {
          const bool list = holds_tensors(argument);
          const bool constant = !list && !THPVariable_Check(argument.ptr());
          made->constants.push_back(constant ? py::reinterpret_borrow<py::object>(argument) : py::object());
          made->listed.push_back(list ? PySequence_Fast_GET_SIZE(argument.ptr()) : NONE);
        }
        for (const Tensor& input : inputs) made->inputs.emplace_back(input);
        const c10::Device device = inputs.at(0).device();
        made->grad = at::GradMode::is_enabled(), made->autocast = at::autocast::is_autocast_enabled(device.type());
        made->state = state, made->stream = current_stream(device), made->slots = static_cast<int>(slots.size());
        made->program = steps(program, made->slots, {&outputs, &differentiable, &saved, &dirty}), made->outputs = std::move(outputs);
        made->differentiable = std::move(differentiable), made->positions = std::move(positions), made->saved = std::move(saved);
        made->released = std::move(released), made->dirty = std::move(dirty), made->constant = std::move(constant);
        made->single = single, made->materialize = materialize, made->context = std::move(context);
        return made;
      }))
      .def("set_backward",
           [](Recorded& self, const py::list& inputs, const py::list& program, std::vector<int> gradients, int slots, Counters counters) {
             const c10::Device device = self.inputs.at(0).device;
             auto program_of = steps(program, slots, {&gradients});
             auto made = std::unique_ptr<Backward>(new Backward{
                 {}, std::move(program_of), std::move(gradients), std::move(counters), slots, device, current_stream(device)});
             for (const Tensor& input : tensors(inputs)) made->inputs.emplace_back(input);
             Backward* none = nullptr;
             if (self.backward.compare_exchange_strong(none, made.get())) made.release();
           })
      .def("set_result", [](Recorded& self, int pick, Counters counters) { self.pick = pick, self.counters = std::move(counters); })
      .def("attach", [](const std::shared_ptr<Recorded>& self, variable_list slots) { return attach(token(self), slots, true); });
  py::class_<Site, std::shared_ptr<Site>>(m, "Site")
      .def(py::init([](std::string name, py::object miss, py::object state) {
        auto made = std::make_shared<Site>();
        made->name = std::move(name), made->miss = std::move(miss), made->state = std::move(state);
        return made;
      }))
      .def("add", [](Site& self, const std::shared_ptr<Recorded>& recorded) { self.known.emplace_back(token(recorded)); })
      .def("function", [](const std::shared_ptr<Site>& self) { return function(self); });
}

#pragma once

// Turns functions of structs into operators of torch.ops.logprobd, whose arguments and results are
// flat. The fields of the structs give their names, types and order.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/torch_ops/types/divergence.h"
#include "kernels/torch_ops/types/fields.h"
#include "kernels/torch_ops/types/linear_logprob.h"
#include "kernels/torch_ops/types/loss.h"

namespace logprobd::torch_ops {

/// A struct that becomes one argument or result per field.
template <typename T>
concept HasFields = requires {
  T::Fields();
};

/// Describes how a value of type T is declared in a schema and passed through the dispatcher.
template <typename T>
struct SchemaType;
template <>
struct SchemaType<double> {
  using Argument = double;
  static constexpr const char* kName = "float";
};
template <>
struct SchemaType<int64_t> {
  using Argument = int64_t;
  static constexpr const char* kName = "int";
};
template <>
struct SchemaType<bool> {
  using Argument = bool;
  static constexpr const char* kName = "bool";
};
template <typename T>
concept Enum = std::is_enum_v<T>;
template <Enum T>
struct SchemaType<T> : SchemaType<int64_t> {};
template <>
struct SchemaType<std::string> {
  using Argument = std::string_view;
  static constexpr const char* kName = "str";
};
template <>
struct SchemaType<at::Tensor> {
  using Argument = const at::Tensor&;
  static constexpr const char* kName = "Tensor";
};
/// A tensor that the operator changes.
template <>
struct SchemaType<at::Tensor&> {
  static constexpr const char* kName = "Tensor(a!)";
};
template <>
struct SchemaType<MaybeTensor> {
  using Argument = const MaybeTensor&;
  static constexpr const char* kName = "Tensor?";
};

/// Returns the fields of a struct as a tuple.
template <HasFields Struct>
auto ToTuple(const Struct& values) {
  return std::apply([&](const auto&... field) { return std::tuple(field.In(values)...); },
                    Struct::Fields());
}

namespace internal {

/// The flat arguments, as a tuple type, for one parameter of a function of structs. A parameter
/// without fields is passed unchanged.
template <typename Parameter>
struct FlatArguments {
  using Tuple = std::tuple<Parameter>;
};
template <typename Fields>
struct FlatFields;
template <typename... Fields>
struct FlatFields<std::tuple<Fields...>> {
  using Tuple = std::tuple<typename SchemaType<ValueOf<Fields>>::Argument...>;
};
template <HasFields Struct>
struct FlatArguments<const Struct&> {
  using Tuple = typename FlatFields<decltype(Struct::Fields())>::Tuple;
};

template <typename Parameter>
inline constexpr size_t kNumFlat = std::tuple_size_v<typename FlatArguments<Parameter>::Tuple>;

template <typename Struct, size_t kBegin, typename Flat, size_t... kIndex>
Struct ToStruct(const Flat& flat, std::index_sequence<kIndex...>) {
  Struct result;
  const auto set = [&](const auto& field, const auto& value) {
    field.In(result) = static_cast<ValueOf<decltype(field)>>(value);
  };
  constexpr auto kFields = Struct::Fields();
  (set(std::get<kIndex>(kFields), std::get<kBegin + kIndex>(flat)), ...);
  return result;
}

/// Reads the parameter that begins at index kBegin of the flat arguments.
template <typename Parameter, size_t kBegin, typename Flat>
decltype(auto) Unflatten(const Flat& flat) {
  using Struct = std::remove_cvref_t<Parameter>;
  if constexpr (HasFields<Struct>) {
    return ToStruct<Struct, kBegin>(flat, std::make_index_sequence<kNumFlat<Parameter>>());
  } else {
    return static_cast<Parameter>(std::get<kBegin>(flat));
  }
}

/// Returns the parameter as a tuple of flat arguments.
template <typename Parameter>
auto Flatten(const std::remove_reference_t<Parameter>& value) {
  using Struct = std::remove_cvref_t<Parameter>;
  if constexpr (HasFields<Struct>) {
    return std::apply(
        [&](const auto&... field) {
          return typename FlatArguments<Parameter>::Tuple(
              static_cast<typename SchemaType<ValueOf<decltype(field)>>::Argument>(
                  field.In(value))...);
        },
        Struct::Fields());
  } else {
    return std::tuple<Parameter>(const_cast<Parameter&>(value));
  }
}

template <typename Result>
struct FlatResult {
  using Type = Result;
};
template <HasFields Result>
struct FlatResult<Result> {
  using Type = decltype(ToTuple(std::declval<Result>()));
};

template <typename Result, typename Tuple>
struct FlatFunction;
template <typename Result, typename... Flat>
struct FlatFunction<Result, std::tuple<Flat...>> {
  using Signature = typename FlatResult<Result>::Type(Flat...);
};

/// Appends what a schema declares for the fields of `Struct`, such as "Tensor hidden".
template <HasFields Struct>
void AppendFields(std::vector<std::string>& list) {
  ForEachField<Struct>([&](const auto& field) {
    list.push_back(std::string(SchemaType<ValueOf<decltype(field)>>::kName) + " " + field.name);
  });
}

/// Appends what a schema declares for a parameter. One without fields takes the next of `names`.
template <typename Parameter>
void AppendParameter(const char* const*& names, std::vector<std::string>& list) {
  using Value = std::remove_cvref_t<Parameter>;
  if constexpr (HasFields<Value>) {
    AppendFields<Value>(list);
  } else {
    constexpr bool kIsChanged = std::is_same_v<Parameter, at::Tensor&>;
    using Type = SchemaType<std::conditional_t<kIsChanged, Parameter, Value>>;
    list.push_back(std::string(Type::kName) + " " + *names++);
  }
}

/// Returns a schema. Arguments are keyword-only from the first that is not a tensor on, since a
/// flag in another's place would be taken without an error.
std::string SchemaText(const char* name, const std::vector<std::string>& arguments,
                       const std::vector<std::string>& results);

}  // namespace internal

/// The operator `kName` that corresponds to functions of structs,
/// `Result(const Struct&..., others...)`.
template <const char* kName, typename Function>
class Operator;
template <const char* kName, typename Result, typename... Parameters>
class Operator<kName, Result(Parameters...)> {
  using Flat = decltype(std::tuple_cat(
      std::declval<typename internal::FlatArguments<Parameters>::Tuple>()...));

 public:
  using Signature = typename internal::FlatFunction<Result, Flat>::Signature;

  /// Declares the operator. `names` are those of the parameters without fields.
  static void Define(torch::Library& library, const std::vector<const char*>& names = {}) {
    std::vector<std::string> arguments, results;
    const char* const* next = names.data();
    (internal::AppendParameter<Parameters>(next, arguments), ...);
    if constexpr (HasFields<Result>) internal::AppendFields<Result>(results);
    library.def(internal::SchemaText(kName, arguments, results).c_str());
  }

  /// Registers a kernel, which calls kFunction with structs made from the flat arguments.
  template <auto kFunction>
  static void Register(torch::Library& library) {
    library.impl(kName, Adapter<kFunction>(static_cast<Signature*>(nullptr)));
  }

  /// Calls the operator through the dispatcher.
  static Result Call(Parameters... parameters) {
    // Found once, since small calls wait for the host.
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(kName, "").template typed<Signature>();
    const auto call = [&] {
      return std::apply([&](auto&&... flat) { return handle.call(flat...); },
                        std::tuple_cat(internal::Flatten<Parameters>(parameters)...));
    };
    if constexpr (HasFields<Result>) {
      const auto results = call();
      return internal::ToStruct<Result, 0>(
          results, std::make_index_sequence<std::tuple_size_v<decltype(results)>>());
    } else {
      return call();
    }
  }

 private:
  template <auto kFunction, typename FlatResult, typename... Arguments>
  static constexpr Signature* Adapter(FlatResult (*)(Arguments...)) {
    return [](Arguments... arguments) -> FlatResult {
      return CallWithStructs<kFunction>(std::forward_as_tuple(arguments...),
                                        std::index_sequence_for<Parameters...>());
    };
  }

  template <auto kFunction, typename Tuple, size_t... kIndex>
  static auto CallWithStructs(const Tuple& flat, std::index_sequence<kIndex...>) {
    if constexpr (HasFields<Result>) {
      return ToTuple(Result(kFunction(internal::Unflatten<Parameters, Begin(kIndex)>(flat)...)));
    } else {
      return kFunction(internal::Unflatten<Parameters, Begin(kIndex)>(flat)...);
    }
  }

  /// Returns the index of the first flat argument of parameter `index`.
  static constexpr size_t Begin(size_t index) {
    constexpr std::array<size_t, sizeof...(Parameters)> kSizes = {
        internal::kNumFlat<Parameters>...};
    size_t begin = 0;
    for (size_t i = 0; i < index; ++i) begin += kSizes[i];
    return begin;
  }
};

inline constexpr char kScore[] = "logprobd::linear_logprob";
/// The last argument is weight_grad.
using ScoreOperator =
    Operator<kScore, LinearLogprobOutputs(const LinearLogprobInputs&, const LinearLogprobOptions&,
                                          const MaybeTensor&)>;

inline constexpr char kBackward[] = "logprobd::linear_logprob_backward";
using BackwardOperator =
    Operator<kBackward, InputGradients(const UpstreamGradients&, const SavedOutputs&,
                                       const LinearLogprobInputs&, const LinearLogprobOptions&,
                                       const GradientNeeds&)>;

inline constexpr char kBackwardInto[] = "logprobd::linear_logprob_backward_into";
/// The first argument is weight_grad, to which the weight's gradient is added.
using BackwardIntoOperator =
    Operator<kBackwardInto, InputGradients(at::Tensor&, const UpstreamGradients&,
                                           const SavedOutputs&, const LinearLogprobInputs&,
                                           const LinearLogprobOptions&, const GradientNeeds&)>;

inline constexpr char kLoss[] = "logprobd::linear_logprob_loss";
/// The last argument is cache_bytes.
using LossOperator =
    Operator<kLoss, LinearLogprobLoss(const LinearLogprobInputs&, const LinearLogprobOptions&,
                                      const LossCoefficients&, const GradientNeeds&, int64_t)>;

inline constexpr char kScaleGradient[] = "logprobd::scale_gradient_";
using ScaleGradientOperator = Operator<kScaleGradient, void(at::Tensor&, const at::Tensor&)>;

inline constexpr char kDivergenceName[] = "logprobd::linear_divergence";
using DivergenceOperator =
    Operator<kDivergenceName, DivergenceOutputs(const DivergenceInputs&, const DivergenceOptions&)>;

inline constexpr char kDivergenceBackward[] = "logprobd::linear_divergence_backward";
using DivergenceBackwardOperator =
    Operator<kDivergenceBackward, InputGradients(const DivergenceUpstream&, const DivergenceInputs&,
                                                 const DivergenceOptions&, const GradientNeeds&)>;

inline constexpr char kDivergenceLoss[] = "logprobd::linear_divergence_loss";
/// The arguments are inputs, options, row_weights, is_mean and needs.
using DivergenceLossOperator =
    Operator<kDivergenceLoss, DivergenceLoss(const DivergenceInputs&, const DivergenceOptions&,
                                             const MaybeTensor&, bool, const GradientNeeds&)>;

}  // namespace logprobd::torch_ops

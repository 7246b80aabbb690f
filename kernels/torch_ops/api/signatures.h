#pragma once

// Turns functions of structs into operators of torch.ops.logprobd, whose arguments are flat. The
// lists of fields in linear_logprob.h give the names, the types and the order.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/loss/loss.h"

namespace logprobd::torch_ops {

/// A struct that becomes one argument per field.
template <typename T>
concept HasFields = requires {
  T::Fields();
};

/// Describes how a member of type T is declared in a schema and passed through the dispatcher.
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
struct SchemaType<T> {
  using Argument = int64_t;
  static constexpr const char* kName = "int";
};
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
template <>
struct SchemaType<std::array<double, 4>> {
  using Argument = std::array<double, 4>;
  static constexpr const char* kName = "float[4]";
};
template <>
struct SchemaType<MaybeTensor> {
  using Argument = const MaybeTensor&;
  static constexpr const char* kName = "Tensor?";
};

/// Returns `fields`, a tuple of Field, as a schema declares them: "Tensor hidden, Tensor weight".
template <typename Fields>
std::string Declare(const Fields& fields) {
  std::string declaration;
  const auto declare = [&]<typename Struct, typename T>(const Field<Struct, T>& field) {
    if (!declaration.empty()) declaration += ", ";
    declaration += SchemaType<T>::kName;
    declaration += ' ';
    declaration += field.name;
  };
  std::apply([&](const auto&... field) { (declare(field), ...); }, fields);
  return declaration;
}
template <HasFields Struct>
std::string Declare() {
  return Declare(Struct::Fields());
}

namespace internal {

/// The flat arguments, as a tuple type, for one parameter of a function of structs. A parameter
/// without fields is passed unchanged.
template <typename Parameter>
struct FlatArguments {
  using Tuple = std::tuple<Parameter>;
};
template <typename Struct, typename Fields>
struct FlatFields;
template <typename Struct, typename... T>
struct FlatFields<Struct, std::tuple<Field<Struct, T>...>> {
  using Tuple = std::tuple<typename SchemaType<T>::Argument...>;
};
template <HasFields Struct>
struct FlatArguments<const Struct&> {
  using Tuple = typename FlatFields<Struct, decltype(Struct::Fields())>::Tuple;
};

template <typename Parameter>
inline constexpr size_t kNumFlat = std::tuple_size_v<typename FlatArguments<Parameter>::Tuple>;

/// Reads the parameter that begins at index kBegin of the flat arguments.
template <typename Parameter, size_t kBegin, typename Flat>
decltype(auto) Unflatten(const Flat& flat) {
  using Struct = std::remove_cvref_t<Parameter>;
  if constexpr (HasFields<Struct>) {
    Struct result;
    const auto set = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      const auto assign = [&]<typename T>(const Field<Struct, T>& field, const auto& argument) {
        result.*field.member = static_cast<T>(argument);
      };
      constexpr auto kFields = Struct::Fields();
      (assign(std::get<kIndex>(kFields), std::get<kBegin + kIndex>(flat)), ...);
    };
    set(std::make_index_sequence<kNumFlat<Parameter>>());
    return result;
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
        [&](const auto&... fields) {
          return typename FlatArguments<Parameter>::Tuple(
              static_cast<typename SchemaType<
                  std::remove_cvref_t<decltype(value.*fields.member)>>::Argument>(
                  value.*fields.member)...);
        },
        Struct::Fields());
  } else {
    return std::tuple<Parameter>(const_cast<Parameter&>(value));
  }
}

template <typename Result, typename Tuple>
struct FlatFunction;
template <typename Result, typename... Flat>
struct FlatFunction<Result, std::tuple<Flat...>> {
  using Signature = Result(Flat...);
};

}  // namespace internal

/// The operator that corresponds to a function of structs, `Result(const Struct&..., others...)`.
template <typename Function>
class Operator;
template <typename Result, typename... Parameters>
class Operator<Result(Parameters...)> {
  using Flat = decltype(std::tuple_cat(
      std::declval<typename internal::FlatArguments<Parameters>::Tuple>()...));

 public:
  using Signature = typename internal::FlatFunction<Result, Flat>::Signature;

  /// Returns a pointer to the kernel that calls kFunction with structs made from its flat
  /// arguments.
  template <auto kFunction>
  static constexpr Signature* Kernel() {
    return Adapter<kFunction>(static_cast<Signature*>(nullptr));
  }

  /// Calls the operator `name` through the dispatcher.
  static Result Call(const char* name, Parameters... parameters) {
    const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
    return std::apply([&](auto&&... flat) { return handle.call(flat...); },
                      std::tuple_cat(internal::Flatten<Parameters>(parameters)...));
  }

 private:
  template <auto kFunction, typename... Arguments>
  static constexpr Signature* Adapter(Result (*)(Arguments...)) {
    return [](Arguments... arguments) -> Result {
      return CallWithStructs<kFunction>(std::forward_as_tuple(arguments...),
                                        std::index_sequence_for<Parameters...>());
    };
  }

  template <auto kFunction, typename Tuple, size_t... kIndex>
  static Result CallWithStructs(const Tuple& flat, std::index_sequence<kIndex...>) {
    return kFunction(internal::Unflatten<Parameters, Begin(kIndex)>(flat)...);
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

/// Returns `fields`, a tuple of Field, of a struct as the tuple that an operator returns.
template <typename Struct, typename Fields>
auto ToTuple(const Struct& results, const Fields& fields) {
  return std::apply([&](const auto&... field) { return std::tuple(results.*field.member...); },
                    fields);
}
template <HasFields Struct>
auto ToTuple(const Struct& results) {
  return ToTuple(results, Struct::Fields());
}
using Outputs = decltype(ToTuple(std::declval<LinearLogprobOutputs>()));
/// The fields of LinearLogprobOutputs::Scores.
using Scores =
    decltype(ToTuple(std::declval<LinearLogprobOutputs>(), LinearLogprobOutputs::Scores()));

/// The gradients d_hidden, d_weight and d_bias.
using Gradients = decltype(ToTuple(std::declval<InputGradients>()));
/// The gradients d_hidden and d_bias, for when the weight's gradient is added to an argument.
using HiddenAndBiasGradients = std::tuple<at::Tensor, at::Tensor>;
/// The loss, the scores and the three gradients.
using LossOutputs = decltype(std::tuple_cat(std::declval<std::tuple<at::Tensor>>(),
                                            std::declval<Scores>(), std::declval<Gradients>()));
/// States whether hidden, weight and bias need a gradient, in this order.
using Needs = std::array<bool, 3>;

inline GradientNeeds ToGradientNeeds(Needs needs, const MaybeTensor& bias) {
  return {needs[0], needs[1], needs[2] && bias.has_value()};
}

/// Returns the shapes of the gradients of a head's inputs for tracing. Sizes may be symbolic.
/// Defined in ops.cc.
Gradients GradientShapes(const at::Tensor& hidden, const at::Tensor& weight,
                         const MaybeTensor& bias, Needs needs);

inline constexpr const char* kScore = "logprobd::linear_logprob";
/// The arguments are inputs, options and weight_grad.
using ScoreOperator =
    Operator<Outputs(const LinearLogprobInputs&, const LinearLogprobOptions&, const MaybeTensor&)>;

inline constexpr const char* kBackward = "logprobd::linear_logprob_backward";
using BackwardOperator =
    Operator<Gradients(const UpstreamGradients&, const SavedOutputs&, const LinearLogprobInputs&,
                       const LinearLogprobOptions&, Needs)>;

inline constexpr const char* kBackwardInto = "logprobd::linear_logprob_backward_into";
/// The last argument is weight_grad.
using BackwardIntoOperator = Operator<HiddenAndBiasGradients(
    const UpstreamGradients&, const SavedOutputs&, const LinearLogprobInputs&,
    const LinearLogprobOptions&, Needs, at::Tensor&)>;

inline constexpr const char* kLoss = "logprobd::linear_logprob_loss";
/// The last argument is cache_bytes.
using LossOperator = Operator<LossOutputs(const LinearLogprobInputs&, const LinearLogprobOptions&,
                                          const LossCoefficients&, Needs, int64_t)>;

inline constexpr const char* kScaleGradient = "logprobd::scale_gradient_";
using ScaleGradientOperator = Operator<void(at::Tensor&, const at::Tensor&)>;

}  // namespace logprobd::torch_ops

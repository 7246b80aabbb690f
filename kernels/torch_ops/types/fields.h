#pragma once

// Lists of the members of structs, with their names in the operators' schemas. ops/signatures.h
// derives schemas, adapters and the values that autograd saves from them.

#include <tuple>
#include <type_traits>

namespace logprobd::torch_ops {

/// States whether the ranks of a group must pass the same value.
enum class AcrossRanks { kMayDiffer, kMustAgree };

/// One member of a struct of arguments or results, with its name in the schema.
template <typename Struct, typename T>
struct Field {
  using Value = T;

  constexpr const T& In(const Struct& values) const { return values.*member; }
  constexpr T& In(Struct& values) const { return values.*member; }

  const char* name;
  T Struct::*member;
  AcrossRanks across_ranks = AcrossRanks::kMayDiffer;
};
template <typename Struct, typename T>
Field(const char*, T Struct::*) -> Field<Struct, T>;
template <typename Struct, typename T>
Field(const char*, T Struct::*, AcrossRanks) -> Field<Struct, T>;

/// One member of a struct's member `part`, with its name in the schema.
template <typename Struct, typename Part, typename T>
struct PartField {
  using Value = T;

  constexpr const T& In(const Struct& values) const { return values.*part.*member; }
  constexpr T& In(Struct& values) const { return values.*part.*member; }

  const char* name;
  Part Struct::*part;
  T Part::*member;
  AcrossRanks across_ranks = AcrossRanks::kMayDiffer;
};
template <typename Struct, typename Part, typename T>
PartField(const char*, Part Struct::*, T Part::*) -> PartField<Struct, Part, T>;
template <typename Struct, typename Part, typename T>
PartField(const char*, Part Struct::*, T Part::*, AcrossRanks) -> PartField<Struct, Part, T>;

/// Returns `fields` of `part`, a tuple of Field, as fields of the struct that has the part.
template <typename Struct, typename Part, typename Fields>
constexpr auto FieldsOf(Part Struct::*part, const Fields& fields) {
  return std::apply(
      [&](const auto&... field) {
        return std::tuple{PartField{field.name, part, field.member, field.across_ranks}...};
      },
      fields);
}
template <typename Struct, typename Part>
constexpr auto FieldsOf(Part Struct::*part) {
  return FieldsOf(part, Part::Fields());
}

/// Calls `visit(field)` for every field of `Struct`, in the order of the schema.
template <typename Struct, typename Visit>
constexpr void ForEachField(const Visit& visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, Struct::Fields());
}

/// The type of the member that a field names.
template <typename AnyField>
using ValueOf = typename std::remove_cvref_t<AnyField>::Value;

}  // namespace logprobd::torch_ops

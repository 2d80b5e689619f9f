// CPU counterparts of the launchers. A problem is planned once (make_plan), then any range of its work units may run on any thread.
#pragma once

#include "plan.h"

namespace fusebackend::tile {

// Work units of a plan, and elements a unit (at most), by which a caller chooses its grain.
int64_t cpu_units(const Plan& plan);
int64_t cpu_unit_elements(const Plan& plan);

void permute_copy_cpu(const Plan& plan, int64_t begin, int64_t end);
void add_cpu(const Plan& plan, AddType type, Alpha alpha, int64_t begin, int64_t end);

}  // namespace fusebackend::tile

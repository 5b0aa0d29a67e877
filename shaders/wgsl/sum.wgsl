{# Included by kernels that add up over a workgroup: defines `sum_of_all`, which every lane calls once, with WORKGROUP_SIZE of the
   including shader. SUM is memory, a tree in workgroup memory, which runs everywhere; subgroups, whose sums workgroup memory
   adds up in order; or subgroup, where a workgroup is one. The order depends on the workgroup's size and the adapter alone. #}
{% if SUM != "subgroup" %}
var<workgroup> partial: array<f32, WORKGROUP_SIZE>;
{% endif %}

{% if SUM == "subgroups" %}
struct Place {
    subgroup: u32,
    lane: u32,
    num_subgroups: u32,
}

fn sum_of_all(value: f32, place: Place) -> f32 {
    let sum = subgroupAdd(value);
    if (place.lane == 0u) {
        partial[place.subgroup] = sum;
    }
    workgroupBarrier();
    var all = 0.0;
    for (var i = 0u; i < place.num_subgroups; i++) {
        all += partial[i];
    }
    return all;
}
{% elif SUM == "subgroup" %}
fn sum_of_all(value: f32, lane: u32) -> f32 {
    return subgroupAdd(value);
}
{% else %}
fn sum_of_all(value: f32, lane: u32) -> f32 {
    partial[lane] = value;
    workgroupBarrier();
    for (var stride = WORKGROUP_SIZE / 2u; stride > 0u; stride >>= 1u) {
        if (lane < stride) {
            partial[lane] += partial[lane + stride];
        }
        workgroupBarrier();
    }
    return partial[0];
}
{% endif %}

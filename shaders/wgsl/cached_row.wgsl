{# Included by attend.wgsl: where a token's row of one head lies in a layer's paged cache. A block of a KV head is its tokens'
   rows of values, and with q8_0 behind those their rows of scales: a word holds those of two blocks of 32 values, f16.
   load_row.wgsl reads a row. #}
{% set SCALE_WORDS = (HEAD_DIM + 63) // 64 %}
struct Row {
    values: u32,    // index of the first vec4<u32>
    {% if KV == "q8_0" %}
    scales: u32,    // number of the first word
    {% endif %}
}

fn row_of(table_base: u32, token: u32, kv_head: u32) -> Row {
    let block_id = block_tables[table_base + token / BLOCK_SIZE];
    let offset = token % BLOCK_SIZE;
    {% if KV == "q8_0" %}
    let block = (block_id * params.num_kv_heads + kv_head) * {{ BLOCK_SIZE * (HEAD_DIM + 4 * SCALE_WORDS) // 16 }}u;
    return Row(
        block + offset * {{ HEAD_DIM // 16 }}u,
        (block + {{ BLOCK_SIZE * HEAD_DIM // 16 }}u) * 4u + offset * {{ SCALE_WORDS }}u
    );
    {% else %}
    return Row(((block_id * params.num_kv_heads + kv_head) * BLOCK_SIZE + offset) * {{ HEAD_DIM // 8 }}u);
    {% endif %}
}

{% if KV == "f16" %}
fn halves(low: u32, high: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(low), unpack2x16float(high));
}
{% endif %}

{# Included by the matrix kernels: an element of the output, of a row of the shard. Uses `params` and `output` of the including
   shader. #}
fn store(token: u32, row: u32, sum: f32) {
    if (token >= params.num_tokens || row >= params.num_rows) {
        return;
    }
    let index = token * params.output_stride + params.row_start + row;
    var value = sum;
    if (params.accumulate == 1u) {
        value += output[index];
    }
    output[index] = value;
}

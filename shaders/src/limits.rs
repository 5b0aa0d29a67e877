//! WebGPU's default limits: what every adapter offers, and so what baseline variants keep to.
//!
//! Read by the engine's plan and by the portability test.

/// `maxComputeInvocationsPerWorkgroup`
pub const MAX_INVOCATIONS: u32 = 256;
/// `maxComputeWorkgroupStorageSize`, bytes
pub const MAX_WORKGROUP_STORAGE_BYTES: u32 = 16 * 1024;
/// `maxStorageBuffersPerShaderStage`
pub const MAX_STORAGE_BUFFERS: usize = 8;
/// `maxComputeWorkgroupsPerDimension`
pub const MAX_WORKGROUPS: u32 = 65_535;

/// Splits `count` invocations into a grid of (workgroups in x, rows in y) when x alone would pass [`MAX_WORKGROUPS`].
/// Returns (x, y, invocations a row).
pub fn grid_2d(count: u32, workgroup_size: u32) -> (u32, u32, u32) {
    let workgroups = count.div_ceil(workgroup_size).max(1);
    if workgroups <= MAX_WORKGROUPS {
        return (workgroups, 1, workgroups * workgroup_size);
    }
    let rows = workgroups.div_ceil(MAX_WORKGROUPS);
    let columns = workgroups.div_ceil(rows);
    (columns, rows, columns * workgroup_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grid_covers_every_invocation_within_the_limit() {
        for count in [1, 63, 64, 65, 64 * 65_535, 64 * 65_535 + 1, 1 << 30] {
            let (x, y, row) = grid_2d(count, 64);
            assert!(x <= MAX_WORKGROUPS && y <= MAX_WORKGROUPS, "{count}: {x} x {y}");
            assert_eq!(row, x * 64);
            assert!(u64::from(row) * u64::from(y) >= u64::from(count), "{count}");
        }
    }
}

//! What benches make of their rounds.
#![allow(dead_code, reason = "each bench uses a part of it")]

/// The middle one.
pub fn median(values: Vec<f64>) -> f64 {
    let mut values = values;
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The least value that this part of all does not exceed.
pub fn percentile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[((values.len() as f64 * part).ceil() as usize).clamp(1, values.len()) - 1]
}

/// CPU seconds that a process has taken.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

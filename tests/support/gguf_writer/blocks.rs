//! Rounds blocks of values to every quantised storage type: nearest codes, scales from the block's range.

use engine::model_file::{IQ4_NL_VALUES, StorageType};
use half::f16;

/// The stored bytes of one block of `storage.block_len()` values.
pub fn store_block(storage: StorageType, block: &[f32]) -> Vec<u8> {
    match storage {
        StorageType::Q4_K | StorageType::Q5_K => grouped(storage, block),
        StorageType::Q6_K => q6_k(block),
        StorageType::IQ4_NL => iq4_nl(block),
        _ => plain(storage, block),
    }
}

fn range(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::MAX, f32::MIN), |(low, high), &x| (low.min(x), high.max(x)))
}

/// The nearest code of each value of scale · code + minimum.
fn codes(values: &[f32], scale: f32, minimum: f32, least: f32, most: f32) -> Vec<i32> {
    let code = |x: &f32| if scale == 0.0 { 0.0 } else { (x - minimum) / scale };
    values.iter().map(|x| code(x).round().clamp(least, most) as i32).collect()
}

fn halves(codes: &[i32]) -> impl Iterator<Item = u8> {
    (0..16).map(|i| (codes[i] & 15 | (codes[i + 16] & 15) << 4) as u8)
}

fn plain(storage: StorageType, block: &[f32]) -> Vec<u8> {
    let (low, high) = range(block);
    let peak = low.abs().max(high.abs());
    let (d, m, least, most, offset) = match storage {
        StorageType::Q4_0 => (peak / 7.0, 0.0, -8.0, 7.0, 8),
        StorageType::Q4_1 => ((high - low) / 15.0, low, 0.0, 15.0, 0),
        StorageType::Q5_0 => (peak / 15.0, 0.0, -16.0, 15.0, 16),
        StorageType::Q5_1 => ((high - low) / 31.0, low, 0.0, 31.0, 0),
        _ => (peak / 127.0, 0.0, -127.0, 127.0, 0),
    };
    let (d, m) = (f16::from_f32(d), f16::from_f32(m));
    let codes: Vec<i32> =
        codes(block, d.to_f32(), m.to_f32(), least, most).into_iter().map(|code| code + offset).collect();
    let mut bytes = d.to_le_bytes().to_vec();
    if matches!(storage, StorageType::Q4_1 | StorageType::Q5_1) {
        bytes.extend(m.to_le_bytes());
    }
    if matches!(storage, StorageType::Q5_0 | StorageType::Q5_1) {
        let fifth = codes.iter().enumerate().fold(0u32, |bits, (i, code)| bits | ((code >> 4) as u32 & 1) << i);
        bytes.extend(fifth.to_le_bytes());
    }
    match storage {
        StorageType::Q8_0 => bytes.extend(codes.iter().map(|&code| code as i8 as u8)),
        _ => bytes.extend(halves(&codes)),
    }
    bytes
}

fn iq4_nl(block: &[f32]) -> Vec<u8> {
    let (low, high) = range(block);
    let d = f16::from_f32(low.abs().max(high.abs()) / 127.0);
    let nearest = |x: &f32| {
        let wanted = if d.to_f32() == 0.0 { 0.0 } else { x / d.to_f32() };
        let off = |code: &usize| (f32::from(IQ4_NL_VALUES[*code]) - wanted).abs();
        (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap() as i32
    };
    let codes: Vec<i32> = block.iter().map(nearest).collect();
    d.to_le_bytes().into_iter().chain(halves(&codes)).collect()
}

/// Q4_K and Q5_K: a scale and a minimum of six bits for each of eight groups.
fn grouped(storage: StorageType, block: &[f32]) -> Vec<u8> {
    let most = if storage == StorageType::Q4_K { 15.0 } else { 31.0 };
    let ranges: Vec<(f32, f32)> = block.chunks(32).map(range).collect();
    let scale = |(low, high): (f32, f32)| (high - low.min(0.0)) / most;
    let d = f16::from_f32(ranges.iter().map(|&range| scale(range)).fold(0.0, f32::max) / 63.0);
    let least = f16::from_f32(ranges.iter().map(|(low, _)| -low.min(0.0)).fold(0.0, f32::max) / 63.0);
    let six_bits = |value: f32, unit: f16| (value / unit.to_f32().max(1e-8)).round().clamp(0.0, 63.0) as u8;
    let scales: Vec<u8> = ranges.iter().map(|&range| six_bits(scale(range), d)).collect();
    let minima: Vec<u8> = ranges.iter().map(|(low, _)| six_bits(-low.min(0.0), least)).collect();
    let mut all = Vec::new();
    for (group, (&s, &m)) in block.chunks(32).zip(scales.iter().zip(&minima)) {
        let (s, m) = (d.to_f32() * f32::from(s), -(least.to_f32() * f32::from(m)));
        all.extend(codes(group, s, m, 0.0, most));
    }
    let mut bytes = [d.to_le_bytes(), least.to_le_bytes()].concat();
    bytes.extend((0..4).map(|i| scales[i] | (scales[i + 4] >> 4) << 6));
    bytes.extend((0..4).map(|i| minima[i] | (minima[i + 4] >> 4) << 6));
    bytes.extend((4..8).map(|i| scales[i] & 15 | (minima[i] & 15) << 4));
    if storage == StorageType::Q5_K {
        let fifth = |i: usize| (0..8).fold(0, |bits, group| bits | ((all[32 * group + i] >> 4) as u8 & 1) << group);
        bytes.extend((0..32).map(fifth));
    }
    for pair in all.chunks(64) {
        bytes.extend((0..32).map(|i| (pair[i] & 15 | (pair[i + 32] & 15) << 4) as u8));
    }
    bytes
}

fn q6_k(block: &[f32]) -> Vec<u8> {
    let peak = |values: &[f32]| range(values).1.max(-range(values).0);
    let d = f16::from_f32(peak(block) / 31.0 / 127.0);
    let mut scales = Vec::new();
    let mut all = Vec::new();
    for group in block.chunks(16) {
        let scale = (peak(group) / 31.0 / d.to_f32().max(1e-8)).round().clamp(1.0, 127.0);
        scales.push(scale as i8 as u8);
        all.extend(codes(group, d.to_f32() * scale, 0.0, -32.0, 31.0).into_iter().map(|code| (code + 32) as u8));
    }
    let (mut low, mut high) = (Vec::new(), Vec::new());
    for half in all.chunks(128) {
        low.extend((0..64).map(|i| half[i] & 15 | (half[i + 64] & 15) << 4));
        let upper = |i: usize| (0..4).fold(0, |bits, part| bits | (half[32 * part + i] >> 4) << (2 * part));
        high.extend((0..32).map(upper));
    }
    [low, high, scales, d.to_le_bytes().to_vec()].concat()
}

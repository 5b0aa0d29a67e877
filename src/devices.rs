//! `pagoda devices`: every adapter, its limits, and what `auto` takes.

use std::process::ExitCode;

use anyhow::Result;
use engine::device::{self, DeviceInfo};

/// Prints the list.
pub fn devices() -> Result<ExitCode> {
    let (infos, auto) = device::list();
    for info in &infos {
        print_device(info, info.name == auto);
    }
    println!("* what --device auto takes. Software adapters are taken only when named.");
    Ok(ExitCode::SUCCESS)
}

fn print_device(info: &DeviceInfo, is_auto: bool) {
    let mark = if is_auto { "*" } else { " " };
    println!("{mark} {:<10} {} ({})", info.name, info.adapter, info.kind);
    if !info.driver.is_empty() {
        println!("    driver     {}", info.driver);
    }
    if let Some(memory) = info.memory_bytes {
        println!("    memory     {}", indicatif::BinaryBytes(memory));
    }
    if let (Some(buffer), Some(binding)) = (info.max_buffer_bytes, info.max_binding_bytes) {
        println!(
            "    limits     {} a buffer, {} a binding",
            indicatif::BinaryBytes(buffer),
            indicatif::BinaryBytes(binding)
        );
        println!("    features   {}", info.features.join(" "));
    }
}

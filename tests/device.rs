//! What a device tells of its memory, and what is found by trying where it does not.

mod support;

use engine::device::{self, Selected};
use engine::kernels::Gpu;

#[test]
fn a_probe_finds_memory_and_gives_it_back() {
    let Some(name) = support::software_vulkan() else { return };
    let selected = device::select(&name).unwrap();
    let memory = selected.memory(1000, None);
    let total = memory.total_bytes.expect("Vulkan tells the size of its heaps");
    assert!(total > 1 << 28 && !memory.is_own && memory.weights_bytes == 1000, "{memory:?}");
    let Selected::Gpu(open) = selected else { panic!("{name} is a GPU") };
    let wanted = 300 << 20;
    for _ in 0..3 {
        let probed = open.probe(wanted);
        assert!((wanted..wanted + (128 << 20)).contains(&probed), "{probed}");
    }
    // The device is as good as new.
    let gpu = Gpu::new(*open).unwrap();
    let buffer = gpu.upload("a test", &[7; 64]).unwrap();
    assert_eq!(gpu.read(&[(&buffer, 64)]).unwrap()[0], [7; 64]);
    assert_eq!(gpu.allocated_bytes(), 64);
}

#[test]
fn the_list_tells_each_device_s_memory() {
    let (infos, _) = device::list();
    let cpu = infos.iter().find(|info| info.name == device::CPU).unwrap();
    assert_eq!(cpu.memory_bytes.is_some(), cfg!(target_os = "linux"), "{cpu:?}");
    assert!(cpu.memory_bytes.is_none_or(|bytes| bytes > 1 << 28), "{cpu:?}");
}

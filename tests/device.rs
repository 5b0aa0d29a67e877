//! What a device tells of its memory, what is found by trying where it does not, and pipelines that are kept on disk.

mod support;

use engine::device::{self, Selected};
use engine::kernels::Gpu;
use engine::kv::KvCacheDtype;
use engine::model_runner::wgpu_runner;
use std::sync::Arc;
use support::driver::{Fed, config, greedy};
use support::tiny_model::Tiny;

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

#[test]
fn pipelines_are_kept_and_taken_again_and_a_broken_file_is_made_anew() {
    let Some(gpu) = support::gpu() else { return };
    let (_model_directory, path) = Tiny::default().write();
    let directory = tempfile::tempdir().unwrap();
    let load = || {
        let (mut config, file, sizes) = config(&path, 256, KvCacheDtype::F16);
        config.pipeline_cache = Some(directory.path().join("pipelines"));
        let mut runner = wgpu_runner(Arc::clone(&gpu), &file, &sizes, &config, &mut |_, _| {}).unwrap();
        greedy(&mut runner, &mut Fed::in_order(64), &[1, 2, 3], 640, 8)
    };
    let kept = || {
        let entries = std::fs::read_dir(directory.path().join("pipelines")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let first = load();
    let files = kept();
    assert_eq!(files.len(), 1, "{files:?}");
    let whole = std::fs::read(&files[0]).unwrap();
    assert_eq!(load(), first);
    for broken in [&whole[..10], &whole[..whole.len() - 1], b"something else that is long enough to hold a checksum"] {
        std::fs::write(&files[0], broken).unwrap();
        assert_eq!(load(), first);
        let file = std::fs::read(&files[0]).unwrap();
        assert!(file != *broken && file.len() > 32, "the file is whole again");
    }
    // Where nothing can be kept, the engine runs all the same.
    std::fs::remove_dir_all(directory.path().join("pipelines")).unwrap();
    std::fs::write(directory.path().join("pipelines"), "a file").unwrap();
    assert_eq!(load(), first);
}

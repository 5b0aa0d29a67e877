//! Every kernel variant, without a GPU: naga parses and validates it, and translates it to SPIR-V, MSL, HLSL and GLSL.
//!
//! This proves translation, not that a driver's compiler accepts the text; baseline variants stay within WebGPU's default
//! limits, and the bindings are those of the catalogue.

use naga::ShaderStage::Compute;
use naga::back::{glsl, hlsl, msl, spv};
use naga::proc::BoundsCheckPolicies;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, ImageClass, Module, StorageAccess, StorageFormat};
use shaders::{Binding, CATALOGUE, Variant, limits, params, variants};

struct Checked {
    label: String,
    module: Module,
    info: ModuleInfo,
}

fn check(variant: &Variant) -> Checked {
    let label = variant.label();
    let source = variant.render().unwrap_or_else(|error| panic!("{label}: {error}"));
    let module = naga::front::wgsl::parse_str(&source)
        .unwrap_or_else(|error| panic!("{label}: {}\n{source}", error.emit_to_string(&source)));
    // f32 only: `unpack2x16float` needs SHADER_FLOAT16_IN_FLOAT32, which is not the f16 type.
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if variant.needs_subgroups() {
        capabilities |= Capabilities::SUBGROUP;
    }
    if variant.needs_f16() {
        capabilities |= Capabilities::SHADER_FLOAT16;
    }
    if variant.needs_matrices() {
        capabilities |= Capabilities::COOPERATIVE_MATRIX;
    }
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .validate(&module)
        .unwrap_or_else(|error| panic!("{label}: {}", error.emit_to_string(&source)));
    Checked { label, module, info }
}

#[test]
fn every_variant_is_valid_and_translates() {
    let all = variants();
    assert_eq!(CATALOGUE.len(), 21, "kernels in the catalogue");
    assert_eq!(all.len(), 1105, "variants");
    for shader in CATALOGUE {
        assert!(all.iter().any(|variant| variant.shader.name == shader.name), "{} has no variant", shader.name);
    }
    for variant in &all {
        let checked = check(variant);
        to_spirv(&checked);
        to_msl(&checked);
        // Neither DX12 nor GL has cooperative matrices.
        if variant.needs_matrices() {
            continue;
        }
        to_hlsl(&checked, hlsl::ShaderModel::V6_2);
        // Chosen only where the adapter has subgroups, or half precision, which none of these has.
        if variant.needs_subgroups() || variant.needs_f16() {
            continue;
        }
        to_hlsl(&checked, hlsl::ShaderModel::V5_1);
        to_glsl(&checked, glsl::Version::Desktop(450));
        to_glsl(&checked, glsl::Version::Embedded { version: 310, is_webgl: false });
    }
}

fn to_spirv(Checked { label, module, info }: &Checked) {
    let options = spv::Options { lang_version: (1, 3), ..Default::default() };
    let pipeline = spv::PipelineOptions { shader_stage: Compute, entry_point: "main".into() };
    let words =
        spv::write_vec(module, info, &options, Some(&pipeline)).unwrap_or_else(|e| panic!("{label}: SPIR-V: {e}"));
    assert_eq!(words[0], 0x0723_0203, "{label}: SPIR-V magic");
}

fn to_msl(Checked { label, module, info }: &Checked) {
    let options = msl::Options { lang_version: (2, 4), ..Default::default() };
    let pipeline = msl::PipelineOptions { entry_point: Some((Compute, "main".into())), ..Default::default() };
    let (text, translation) =
        msl::write_string(module, info, &options, &pipeline).unwrap_or_else(|e| panic!("{label}: MSL: {e}"));
    translation.entry_point_names[0].as_ref().unwrap_or_else(|e| panic!("{label}: MSL entry point: {e}"));
    assert!(text.contains("kernel void"), "{label}: MSL");
}

fn to_hlsl(Checked { label, module, info }: &Checked, shader_model: hlsl::ShaderModel) {
    let mut text = String::new();
    let options = hlsl::Options { shader_model, ..Default::default() };
    let pipeline = hlsl::PipelineOptions { entry_point: Some((Compute, "main".into())) };
    hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(module, info, None)
        .unwrap_or_else(|e| panic!("{label}: HLSL {shader_model:?}: {e}"));
    assert!(text.contains("numthreads"), "{label}: HLSL");
}

fn to_glsl(Checked { label, module, info }: &Checked, version: glsl::Version) {
    let mut text = String::new();
    let options = glsl::Options { version, ..Default::default() };
    let pipeline = glsl::PipelineOptions { shader_stage: Compute, entry_point: "main".into(), multiview: None };
    glsl::Writer::new(&mut text, module, info, &options, &pipeline, BoundsCheckPolicies::default())
        .and_then(|mut writer| writer.write().map(drop))
        .unwrap_or_else(|e| panic!("{label}: GLSL {version:?}: {e}"));
    assert!(text.contains("void main()"), "{label}: GLSL");
}

#[test]
fn bindings_are_those_of_the_catalogue_and_all_used() {
    for variant in variants() {
        let Checked { label, module, info } = check(&variant);
        let entry = &module.entry_points[0];
        assert_eq!((module.entry_points.len(), entry.name.as_str()), (1, "main"), "{label}");
        let mut found: Vec<(u32, Binding)> = Vec::new();
        for (handle, variable) in module.global_variables.iter() {
            let Some(binding) = &variable.binding else { continue };
            assert_eq!(binding.group, 0, "{label}");
            assert!(!info.get_entry_point(0)[handle].is_empty(), "{label}: binding {} is unused", binding.binding);
            let kind = match variable.space {
                AddressSpace::Uniform => Binding::Params,
                AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => Binding::ReadWrite,
                AddressSpace::Storage { .. } => Binding::Read,
                AddressSpace::Handle => Binding::Weights(texel_words(&module, variable.ty)),
                space => panic!("{label}: {space:?}"),
            };
            found.push((binding.binding, kind));
        }
        found.sort_by_key(|(index, _)| *index);
        let expected = (0..variant.shader.bindings.len()).map(|index| (index as u32, variant.binding(index)));
        let expected: Vec<(u32, Binding)> = expected.collect();
        assert_eq!(found, expected, "{label}");
        assert_eq!(variant.shader.bindings.last(), Some(&Binding::Params), "{label}");
    }
}

/// Words of a read-only image's texel.
fn texel_words(module: &Module, image: naga::Handle<naga::Type>) -> u32 {
    let naga::TypeInner::Image { class: ImageClass::Storage { format, access }, .. } = module.types[image].inner else {
        panic!("a handle that is no storage image");
    };
    assert_eq!(access, StorageAccess::LOAD);
    match format {
        StorageFormat::Rgba32Uint => 4,
        StorageFormat::R32Uint => 1,
        format => panic!("{format:?}"),
    }
}

#[test]
fn variants_fit_the_default_limits_of_webgpu() {
    for variant in variants() {
        let Checked { label, module, .. } = check(&variant);
        let invocations: u32 = module.entry_points[0].workgroup_size.iter().product();
        assert!(invocations <= limits::MAX_INVOCATIONS, "{label}: {invocations} invocations");
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let workgroup_bytes: u32 = module
            .global_variables
            .iter()
            .filter(|(_, variable)| variable.space == AddressSpace::WorkGroup)
            .map(|(_, variable)| layouter[variable.ty].size)
            .sum();
        assert!(workgroup_bytes <= limits::MAX_WORKGROUP_STORAGE_BYTES, "{label}: {workgroup_bytes} bytes");
        let storage = variant.shader.bindings.iter().filter(|binding| **binding != Binding::Params).count();
        assert!(storage <= limits::MAX_STORAGE_BUFFERS, "{label}: {storage} storage buffers");
    }
}

#[test]
fn parameter_structs_have_the_size_that_wgsl_gives_them() {
    let mut seen = 0;
    for variant in variants() {
        let Checked { label, module, .. } = check(&variant);
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let (_, uniform) = module
            .global_variables
            .iter()
            .find(|(_, variable)| variable.space == AddressSpace::Uniform)
            .unwrap_or_else(|| panic!("{label} has no params"));
        let stem: String = variant.shader.name.split('_').map(capitalized).collect();
        let (_, bytes) = params::SIZES
            .iter()
            .find(|(name, _)| *name == stem)
            .unwrap_or_else(|| panic!("{label}: no params struct named {stem}"));
        assert_eq!(layouter[uniform.ty].size as usize, *bytes, "{label}");
        seen += 1;
    }
    assert_eq!(seen, variants().len());
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

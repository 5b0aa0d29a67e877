//! The tiers below the device.

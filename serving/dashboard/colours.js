// Colours that stay apart for colour-blind readers: Okabe and Ito's for names, cividis for amounts.

const OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"];
const OTHERS = "#999999";
const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];

export function nameColour(index) {
  return OKABE_ITO[index] ?? OTHERS;
}

export function amountColour(share) {
  const at = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  const mixed = CIVIDIS[low].map((value, k) => Math.round(value + (at - low) * (CIVIDIS[low + 1][k] - value)));
  return `rgb(${mixed.join(", ")})`;
}

export function amountRamp() {
  return `linear-gradient(90deg, ${CIVIDIS.map((c) => `rgb(${c.join(", ")})`).join(", ")})`;
}

// The end of a scale that starts at zero: 1, 2 or 5 times a power of ten, and 100% at most.
export function scaleEnd(largest) {
  if (!(largest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  const step = [1, 2, 5, 10].find((each) => each * power >= largest * 0.999);
  return Math.min(1, step * power);
}
